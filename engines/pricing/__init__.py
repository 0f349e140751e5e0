"""What prices a model on a machine that is not here: operations of a plan, placements, virtual time."""
