"""Names to constructors: plain dicts, nothing registers itself by import.

A new technique is one file and one line here.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

from devices.base import Clock, Meter
from engines.oracle import OracleParameters
from engines.techniques.presets import PRESETS, Composed, CustomParameters, preset_parameters
from results.records import Record
from workloads.aime import AIME24, AIME25
from workloads.any_task import AnyTask, AnyTaskParameters
from workloads.azure_trace import AzureTrace, AzureTraceParameters
from workloads.base import Workload
from workloads.benchmark import BenchmarkParameters, GeneratingParameters
from workloads.boolq import BoolQ, BoolQParameters
from workloads.code_tasks import HUMANEVAL, HUMANEVAL_INSTRUCT, MBPP_PLUS, CodeBenchmark
from workloads.fidelity import Fidelity, FidelityParameters
from workloads.fixed_lengths import FixedLengths, FixedLengthsParameters
from workloads.gsm8k import GSM8K, GSM8K_COT, GSM8K_COT_ZEROSHOT
from workloads.hellaswag import HellaSwag, HellaSwagParameters
from workloads.mathqa import TASK as MATHQA
from workloads.mmlu import MMLU, MMLUParameters
from workloads.mt_bench import MTBench, MTBenchParameters
from workloads.rolebench import RoleBench, RoleBenchParameters
from workloads.ruler import (
    HaystackParameters,
    NeedleInHaystackParameters,
    NeedleParameters,
    niah_multikey_1,
    niah_multikey_2,
    niah_multikey_3,
    niah_multiquery,
    niah_multivalue,
    niah_single_1,
    niah_single_2,
    niah_single_3,
)
from workloads.ruler_qa import qa_hotpot, qa_squad
from workloads.ruler_samples import RulerParameters
from workloads.ruler_tracking import RulerVariableTracking
from workloads.ruler_words import RulerCommonWords, RulerFrequentWords
from workloads.sharegpt import ShareGPT, ShareGPTParameters
from workloads.single_task import SingleTask, TaskBenchmark
from workloads.strategyqa import TASK as STRATEGYQA
from workloads.truthfulqa import GEN as TRUTHFULQA_GEN
from workloads.truthfulqa import MC1 as TRUTHFULQA_MC1
from workloads.truthfulqa import MC2 as TRUTHFULQA_MC2


class TechniqueEntry(NamedTuple):
    parameters: type[Composed] | type[OracleParameters]
    what: str
    source: str


class WorkloadEntry(NamedTuple):
    parameters: type[Record]
    build: Callable[..., Workload]
    what: str
    runs_code: bool = False
    """Code that a model wrote: built only where the user allowed it."""
    smaller_is_part: bool = True
    """With a smaller limit it asks some of the items that it asks with a larger one, and can wherever that can."""


class MeterEntry(NamedTuple):
    build: Callable[[float, Clock, Any], Meter]
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


def _asked(task: SingleTask, what: str) -> WorkloadEntry:
    return WorkloadEntry(BenchmarkParameters, partial(TaskBenchmark, task), what)


def _generated(task: SingleTask, what: str) -> WorkloadEntry:
    return WorkloadEntry(GeneratingParameters, partial(TaskBenchmark, task), what)


WORKLOADS: dict[str, WorkloadEntry] = {
    "hellaswag": WorkloadEntry(HellaSwagParameters, HellaSwag, "lm-eval's HellaSwag: acc, acc_norm"),
    "boolq": WorkloadEntry(BoolQParameters, BoolQ, "lm-eval's BoolQ: acc"),
    "truthfulqa_mc1": _asked(TRUTHFULQA_MC1, "lm-eval's TruthfulQA, one true choice: acc"),
    "truthfulqa_mc2": _asked(TRUTHFULQA_MC2, "TruthfulQA, the probability of true choices: acc"),
    "truthfulqa_gen": _generated(
        TRUTHFULQA_GEN, "TruthfulQA, generated: BLEU and ROUGE against true and false answers"
    ),
    "mathqa": _asked(MATHQA, "lm-eval's MathQA: acc, acc_norm"),
    "mmlu": WorkloadEntry(MMLUParameters, MMLU, "lm-eval's MMLU: acc over 57 subjects, by group and by subject"),
    "strategyqa": _asked(STRATEGYQA, "StrategyQA in BIG-bench's multiple-choice form: acc"),
    "gsm8k": _generated(GSM8K, "lm-eval's GSM8K, 5 examples: exact_match, strict and flexible"),
    "gsm8k_cot": _generated(GSM8K_COT, "GSM8K with 8 written chains of thought"),
    "gsm8k_cot_zeroshot": _generated(GSM8K_COT_ZEROSHOT, "GSM8K, asked to think step by step"),
    "aime24": _generated(AIME24, "lm-eval's AIME 2024: exact_match"),
    "aime25": _generated(AIME25, "lm-eval's AIME 2025: exact_match"),
    "lm_eval": WorkloadEntry(AnyTaskParameters, AnyTask, "any other task or group of lm-eval, by its name (task)"),
    "humaneval": WorkloadEntry(
        GeneratingParameters,
        partial(CodeBenchmark, HUMANEVAL),
        "functions from their docstrings: pass@1, with --allow-code",
        runs_code=True,
    ),
    "humaneval_instruct": WorkloadEntry(
        GeneratingParameters,
        partial(CodeBenchmark, HUMANEVAL_INSTRUCT),
        "HumanEval as an instruction, with --allow-code",
        runs_code=True,
    ),
    "mbpp_plus": WorkloadEntry(
        GeneratingParameters,
        partial(CodeBenchmark, MBPP_PLUS),
        "functions from a sentence: pass@1, pass@1_plus, with --allow-code",
        runs_code=True,
    ),
    "ruler_niah_single_1": WorkloadEntry(NeedleParameters, niah_single_1, "RULER: one needle in a repeated line"),
    "ruler_niah_single_2": WorkloadEntry(NeedleInHaystackParameters, niah_single_2, "RULER: one needle in prose"),
    "ruler_niah_single_3": WorkloadEntry(NeedleInHaystackParameters, niah_single_3, "RULER: a needle with a UUID"),
    "ruler_niah_multikey_1": WorkloadEntry(
        NeedleInHaystackParameters, niah_multikey_1, "RULER: one needle of four is asked"
    ),
    "ruler_niah_multikey_2": WorkloadEntry(NeedleParameters, niah_multikey_2, "RULER: a needle among needles"),
    "ruler_niah_multikey_3": WorkloadEntry(NeedleParameters, niah_multikey_3, "RULER: a UUID's UUID among UUIDs"),
    "ruler_niah_multivalue": WorkloadEntry(HaystackParameters, niah_multivalue, "RULER: four values of one key"),
    "ruler_niah_multiquery": WorkloadEntry(HaystackParameters, niah_multiquery, "RULER: four keys are asked at once"),
    "ruler_vt": WorkloadEntry(RulerParameters, RulerVariableTracking, "RULER: names that hold a value, in a chain"),
    "ruler_cwe": WorkloadEntry(RulerParameters, RulerCommonWords, "RULER: the ten most common words of a list"),
    "ruler_fwe": WorkloadEntry(RulerParameters, RulerFrequentWords, "RULER: the three most frequent coded words"),
    # Questions whose documents do not fit are left out, and all of a smaller limit's may be such.
    "ruler_qa_squad": WorkloadEntry(
        RulerParameters, qa_squad, "RULER: SQuAD among documents, from the data folder", smaller_is_part=False
    ),
    "ruler_qa_hotpot": WorkloadEntry(RulerParameters, qa_hotpot, "RULER: HotpotQA likewise", smaller_is_part=False),
    "sharegpt": WorkloadEntry(ShareGPTParameters, ShareGPT, "multi-turn chat replay: latency and energy only"),
    "mt_bench": WorkloadEntry(MTBenchParameters, MTBench, "two-turn questions: latency and energy only"),
    "rolebench": WorkloadEntry(RoleBenchParameters, RoleBench, "questions to a role: ROUGE-L against references"),
    "fixed_lengths": WorkloadEntry(
        FixedLengthsParameters, FixedLengths, "exact prompt and answer lengths, one by one or at Poisson arrivals"
    ),
    "azure_trace": WorkloadEntry(
        AzureTraceParameters,
        AzureTrace,
        "arrivals and lengths of Azure's conversation and code services, 2023",
        smaller_is_part=False,  # another stretch of the trace
    ),
    "fidelity": WorkloadEntry(
        FidelityParameters,
        Fidelity,
        "perplexity of texts; KL divergence and same first token, against the reference arm",
    ),
}


def _nvml(interval_s: float, clock: Clock, spec: Any) -> Meter:
    from devices.meters.nvml import NvmlMeter

    return NvmlMeter(interval_s, clock)


def _rapl(interval_s: float, clock: Clock, spec: Any) -> Meter:
    from devices.meters.rapl import RaplMeter

    return RaplMeter(interval_s, clock)


def _perf(interval_s: float, clock: Clock, spec: Any) -> Meter:
    from devices.meters.perf import PerfMeter

    return PerfMeter(interval_s, clock)


def _jetson(interval_s: float, clock: Clock, spec: Any) -> Meter:
    from devices.meters.rails import JetsonMeter

    return JetsonMeter(interval_s, clock)


def _hwmon(interval_s: float, clock: Clock, spec: Any) -> Meter:
    from devices.meters.rails import HwmonMeter

    return HwmonMeter(interval_s, clock)


def _battery(interval_s: float, clock: Clock, spec: Any) -> Meter:
    from devices.meters.laptop_battery import LaptopBatteryMeter

    return LaptopBatteryMeter(interval_s, clock)


def _zeus(interval_s: float, clock: Clock, spec: Any) -> Meter:
    from devices.meters.zeus import ZeusMeter

    return ZeusMeter(interval_s, clock)


def _modelled(interval_s: float, clock: Clock, spec: Any) -> Meter:
    from devices.meters.modelled import ModelledMeter, load_watts_sheet

    return ModelledMeter(interval_s, clock, load_watts_sheet(spec.watts_sheet))


def _replay(interval_s: float, clock: Clock, spec: Any) -> Meter:
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
