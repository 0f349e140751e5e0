"""What the makers call the processors of a family and model: rows of one instruction set differ between them."""

from __future__ import annotations

import re

from devices.conditions import cpu_model

# Families and models as Linux tells them apart, in arch/x86/kernel/cpu/amd.c and arch/x86/include/asm/intel-family.h.
ZEN_OF_FAMILY_25 = {3: (range(0x10), range(0x20, 0x60)), 4: (range(0x10, 0x20), range(0x60, 0xB0))}
INTEL_FAMILY_6 = {
    85: "Skylake-X to Cooper Lake",
    106: "Ice Lake-X",
    143: "Sapphire Rapids",
    173: "Granite Rapids",
    207: "Emerald Rapids",
}


def generation(named: str | None = None) -> str:
    """named: as an environment names the processor; by default this one. One that is not known keeps its numbers."""
    named = cpu_model() if named is None else named
    numbers = re.search(r"\(family (\d+), model (\d+)\)$", named)
    if numbers is None:
        return named
    family, model = map(int, numbers.groups())
    if "AMD" in named and family == 25:
        for zen, models in ZEN_OF_FAMILY_25.items():
            if any(model in one for one in models):
                return f"Zen {zen}"
    if "AMD" in named and family == 26 and model < 0x50:
        return "Zen 5"
    if "Intel" in named and family == 6 and model in INTEL_FAMILY_6:
        return INTEL_FAMILY_6[model]
    return f"family {family} model {model}"
