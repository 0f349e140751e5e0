"""The ground floor: what a run says. Records, energy arithmetic, statistics, store, tables, reports."""
