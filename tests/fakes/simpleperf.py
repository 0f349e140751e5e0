"""simpleperf on a fake phone: counts what the test says that the programs have used."""

from __future__ import annotations

import sys

from tests.fakes.phone import FakePhone, put

_PROGRAM = """#!{python} -SE
import os, pathlib, signal, sys, time
phone = pathlib.Path(os.environ["PHONE"])
says = (phone / "simpleperf.says").read_text()
if says:
    sys.stderr.write(says + "\\n")
    sys.exit(1)
time.sleep(float((phone / "simpleperf.loads_s").read_text()))
(phone / "simpleperf.asked").write_text(" ".join(sys.argv[1:]))
counter = (phone / "anon_inode:[perf_event]").open("w")
cycles = lambda: int((phone / "simpleperf.cycles").read_text())
before = cycles()
def end(*_):
    sys.stdout.write("Performance counter statistics,\\n")
    sys.stdout.write((phone / "simpleperf.row").read_text().replace("{}", str(cycles() - before)) + "\\n")
    sys.stdout.write("Total test time,1.000000,seconds,\\n")
    sys.stdout.flush()
    os._exit(0)
signal.signal(signal.SIGINT, end)
while True:
    time.sleep(0.01)
"""


class FakeSimpleperf:
    """says: its errors before it ends at once. row: of its table, with {} for the count. loads_s: before it counts."""

    def __init__(
        self, phone: FakePhone, says: str = "", row: str = "{},cpu-cycles,1.9,GHz,(100%),", loads_s: float = 0.0
    ) -> None:
        self._root = phone.root
        put(phone.root / "simpleperf.says", says)
        put(phone.root / "simpleperf.row", row)
        put(phone.root / "simpleperf.loads_s", str(loads_s))
        self.use(0)
        program = phone.root / "bin" / "simpleperf"
        program.write_text(_PROGRAM.replace("{python}", sys.executable))
        program.chmod(0o755)

    def use(self, cycles: int) -> None:
        """What the programs have used in all so far."""
        put(self._root / "simpleperf.cycles", str(cycles))

    @property
    def asked(self) -> str:
        return (self._root / "simpleperf.asked").read_text()
