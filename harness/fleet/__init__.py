"""A plan run by many devices at once: one coordinator has the queue and the store, each device has a worker.

    queue        which trial is next, who has it, until when: leases. No network, no files
    messages     what coordinator and workers say to each other: JSON and Parquet, validated
    coordinator  gives out leases, commits what comes back, once
    road         the way between them over Dask; `dask_*` are the processes at its ends
    worker_side  what a worker does with a message

Dask delivers at least once. Exactly once comes from here: a trial is committed only for the lease that has it now, and
the store holds at most one trial for a cell and repeat.
"""
