"""Shell that runs on the phone and sets what its loop sends: v the voltage, o whether a charger is on line (1 or 0).

A charger of a second or two changes the current and is gone before anybody looks at the whole state. So whoever reads
the gauge looks for one as well: in sysfs with builtins twice a second, or in each `dumpsys battery` that is called for
the voltage; else in one that is called when the current falls to less than half, or turns its sign.
"""

from __future__ import annotations

from collections.abc import Sequence

from devices.android.shell import Phone

POWER_SUPPLY = "/sys/class/power_supply"
NOT_A_BATTERY = ("usb", "ac", "dc", "wireless", "wls", "main-charger", "pc_port", "charger")
CHARGER_LOOK_S = 0.5
SED_CHARGER = "s/^  [A-Za-z ]*powered: true.*/P/p"
TAKE_CHARGER = "o=0; case $d in *P*) o=1;; esac; d=${d##*P?}"
"""In `dumpsys battery` the lines of chargers are above those of the battery."""


def read_voltage(every: int) -> str:
    """From `dumpsys battery`, at each so many readings."""
    return (
        "k=$((k-1))\n"
        f"[ $k -gt 0 ] || {{ k={every}; d=$(dumpsys battery | sed -n '{SED_CHARGER};s/^  voltage: //p')\n"
        f"{TAKE_CHARGER}; V=$d; }}\n"
        "v=${V%%[!0-9]*}"
    )


def charger_nodes(phone: Phone) -> list[str]:
    """Nodes of chargers that the shell may read. One that shows a charger now may always do so: it tells nothing."""
    files = phone.read_files(f"{POWER_SUPPLY}/*/{name}" for name in ("online", "type"))
    return sorted(
        path
        for path, text in files.items()
        if path.endswith("/online")
        and text.strip() == "0"
        and files.get(path.replace("/online", "/type"), "").strip() not in ("Battery", "BMS", "Unknown", "")
    )


def look_at_chargers(nodes: Sequence[str], every: int) -> str:
    """At most once in so many readings. c: the current."""
    if not nodes:
        return _LOOK_AT_A_FALL.format(every=every, sed=SED_CHARGER, take=TAKE_CHARGER)
    reads = "; ".join(f'p=; read -r p <{node}; case "$p" in 0|"") ;; *) o=1;; esac' for node in nodes)
    return f"j=$((j-1)); [ $j -gt 0 ] || {{ j={every}; o=0; {reads}; }}"


# b: the highest of late, forgotten within some readings, as a gauge of means falls in steps. g: the sign.
_LOOK_AT_A_FALL = """j=$((j-1)); a=${{c#-}}; case "$a" in ""|*[!0-9]*) a=0;; esac
[ $j -gt 0 ] || {{ [ "$o" != 1 ] && [ "${{g-${{c%%[0-9]*}}}}" = "${{c%%[0-9]*}}" ] && [ $((2*a)) -ge $((b)) ]; }} || {{
j={every}; d=$(dumpsys battery | sed -n '{sed}'); d=$d.; {take}; }}
g=${{c%%[0-9]*}}; b=$((b*7/8)); [ $a -lt $b ] || b=$a"""
