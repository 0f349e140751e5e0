"""Names to constructors: plain dicts, nothing registers itself by import.

A new technique is one file and one line here.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from devices.base import Clock, Meter
from engines.oracle import OracleParameters
from engines.techniques.parameters import Composed, CustomParameters
from engines.techniques.presets import PRESETS, preset_parameters

if TYPE_CHECKING:
    from harness.device_specs import HostSpec


class TechniqueEntry(NamedTuple):
    parameters: type[Composed] | type[OracleParameters]
    what: str
    source: str


class MeterEntry(NamedTuple):
    build: Callable[[float, Clock, HostSpec], Meter]
    """(sample interval, clock, device spec) -> meter, not yet opened."""
    method: str
    what: str


TECHNIQUES: dict[str, TechniqueEntry] = {
    "oracle": TechniqueEntry(
        OracleParameters, "a loop over tokens and their experts, for checking the others", "the definition"
    ),
    **{name: TechniqueEntry(preset_parameters(name), p.what, p.source) for name, p in PRESETS.items()},
    "custom": TechniqueEntry(CustomParameters, "the decisions spelled out: place, layout, ...", "none"),
}


WORKLOADS: dict[str, str] = {
    "hellaswag": "lm-eval's HellaSwag: acc, acc_norm",
    "boolq": "lm-eval's BoolQ: acc",
    "truthfulqa_mc1": "lm-eval's TruthfulQA, one true choice: acc",
    "truthfulqa_mc2": "TruthfulQA, the probability of true choices: acc",
    "truthfulqa_gen": "TruthfulQA, generated: BLEU and ROUGE against true and false answers",
    "mathqa": "lm-eval's MathQA: acc, acc_norm",
    "mmlu": "lm-eval's MMLU: acc over 57 subjects, by group and by subject",
    "strategyqa": "StrategyQA in BIG-bench's multiple-choice form: acc",
    "gsm8k": "lm-eval's GSM8K, 5 examples: exact_match, strict and flexible",
    "gsm8k_cot": "GSM8K with 8 written chains of thought",
    "gsm8k_cot_zeroshot": "GSM8K, asked to think step by step",
    "aime24": "lm-eval's AIME 2024: exact_match",
    "aime25": "lm-eval's AIME 2025: exact_match",
    "lm_eval": "any other task or group of lm-eval, by its name (task)",
    "humaneval": "functions from their docstrings: pass@1, with --allow-code",
    "humaneval_instruct": "HumanEval as an instruction, with --allow-code",
    "mbpp_plus": "functions from a sentence: pass@1, pass@1_plus, with --allow-code",
    "ruler_niah_single_1": "RULER: one needle in a repeated line",
    "ruler_niah_single_2": "RULER: one needle in prose",
    "ruler_niah_single_3": "RULER: a needle with a UUID",
    "ruler_niah_multikey_1": "RULER: one needle of four is asked",
    "ruler_niah_multikey_2": "RULER: a needle among needles",
    "ruler_niah_multikey_3": "RULER: a UUID's UUID among UUIDs",
    "ruler_niah_multivalue": "RULER: four values of one key",
    "ruler_niah_multiquery": "RULER: four keys are asked at once",
    "ruler_vt": "RULER: names that hold a value, in a chain",
    "ruler_cwe": "RULER: the ten most common words of a list",
    "ruler_fwe": "RULER: the three most frequent coded words",
    "ruler_qa_squad": "RULER: SQuAD among documents, from the data folder",
    "ruler_qa_hotpot": "RULER: HotpotQA likewise",
    "sharegpt": "multi-turn chat replay: latency and energy only",
    "mt_bench": "two-turn questions: latency and energy only",
    "rolebench": "questions to a role: ROUGE-L against references",
    "fixed_lengths": "exact prompt and answer lengths, one by one or at Poisson arrivals",
    "azure_trace": "arrivals and lengths of Azure's conversation and code services, 2023",
    "fidelity": "perplexity of texts; KL divergence and same first token, against the reference arm",
}
"""What each of `harness.workload_specs` asks."""


def _nvml(interval_s: float, clock: Clock, spec: HostSpec) -> Meter:
    from devices.meters.nvml import NvmlMeter

    return NvmlMeter(interval_s, clock)


def _rapl(interval_s: float, clock: Clock, spec: HostSpec) -> Meter:
    from devices.meters.rapl import RaplMeter

    return RaplMeter(interval_s, clock)


def _perf(interval_s: float, clock: Clock, spec: HostSpec) -> Meter:
    from devices.meters.perf import PerfMeter

    return PerfMeter(interval_s, clock)


def _jetson(interval_s: float, clock: Clock, spec: HostSpec) -> Meter:
    from devices.meters.rails import JetsonMeter

    return JetsonMeter(interval_s, clock)


def _hwmon(interval_s: float, clock: Clock, spec: HostSpec) -> Meter:
    from devices.meters.rails import HwmonMeter

    return HwmonMeter(interval_s, clock)


def _battery(interval_s: float, clock: Clock, spec: HostSpec) -> Meter:
    from devices.meters.laptop_battery import LaptopBatteryMeter

    return LaptopBatteryMeter(interval_s, clock)


def _zeus(interval_s: float, clock: Clock, spec: HostSpec) -> Meter:
    from devices.meters.zeus import ZeusMeter

    return ZeusMeter(interval_s, clock)


def _modelled(interval_s: float, clock: Clock, spec: HostSpec) -> Meter:
    from devices.meters.modelled import ModelledMeter, load_watts_sheet

    return ModelledMeter(interval_s, clock, load_watts_sheet(spec.watts_sheet))


def _replay(interval_s: float, clock: Clock, spec: HostSpec) -> Meter:
    assert spec.recording is not None  # a plan with this meter and without it is refused
    path = Path(spec.recording)
    if path.suffix == ".parquet":
        from devices.meters.trace_replay import TraceReplayMeter

        return TraceReplayMeter(path, clock)
    from devices.meters.replay import ReplayMeter

    return ReplayMeter(path, clock)


METERS: dict[str, MeterEntry] = {
    "nvml": MeterEntry(_nvml, "counter", "NVIDIA GPUs, energy counter (power samples where there is none)"),
    "rapl": MeterEntry(_rapl, "counter", "Linux powercap: CPU package, cores, memory"),
    "perf": MeterEntry(_perf, "counter", "the counters of RAPL as perf events"),
    "jetson": MeterEntry(_jetson, "integrated power", "INA3221 rails of a Jetson"),
    "hwmon": MeterEntry(_hwmon, "integrated power", "Linux sensors: GPU packages, the input of a server"),
    "battery": MeterEntry(_battery, "battery gauge", "a laptop on its battery: the whole machine"),
    "zeus": MeterEntry(_zeus, "counter", "Apple Silicon, AMD and NVIDIA GPUs, through Zeus"),
    "modelled": MeterEntry(_modelled, "modelled", "CPU time x watts of a sheet: always there, never measured"),
    "replay": MeterEntry(_replay, "replayed", "a recorded trace, Parquet or power CSV (recording)"),
}


def technique_line(name: str) -> str | None:
    """What it does, as `joulebench list techniques` says; None of choices spelled out."""
    entry = TECHNIQUES.get(name)
    return None if entry is None else entry.what
