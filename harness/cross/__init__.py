"""The cross table: every technique of every source on every machine where it makes sense, one model, one workload.

Nothing runs: plans are priced on hardware sheets (`engines.pricing.cells`), so every figure is modelled. `arms` says
what goes where, `table` prices it, `fronts` and `sensitivity` draw conclusions, `pages` draws them.
"""
