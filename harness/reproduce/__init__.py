"""Every number that the sources print, beside ours: `joulebench reproduce`.

`ledger` reads what the sources claim and how each row will be judged, `findings` judges, `pages` draws. A package per
source gives two pure functions, `findings()` and `tables()`:

    from harness.reproduce.findings import Finding
    from harness.reproduce.ledger import ledger
    from harness.reproduce.redrawn import Entry, SourceTable

    def findings() -> Iterable[Finding]:
        yield Finding("000-021", expert_mib(PHI_3_5_MOE), "shape")
        yield Finding("000-042", ttft_ratio(1024, 256), "priced", explanation="the source's base ... ; ours ...")
        yield Finding("000-003", None, missing="cycles a second, and how a launch waits")

    def tables() -> Iterable[SourceTable]:
        yield SourceTable("Table 4", ..., entries=(Entry("gather", "Core ML CPU", ours=3.67, claim="000-116"), ...))

Class and tolerance of a row stand in classes.csv, and the verdict follows. A second finding of the same claim (another
method) is shown beside the first, which counts. Rows of class `input` and `not predictable` need no finding. A fit
reads figures with `ledger().calibration("000-152")` and no other way; arithmetic on a source's own figures, in a module
called `arithmetic.py` or `tables.py`, with `ledger().figure("000-152")`.
"""
