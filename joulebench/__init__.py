"""`python -m joulebench`: the command line without its script. The code is in harness, engines, workloads, devices and
results."""
