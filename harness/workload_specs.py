"""The workloads of a plan: a union that `name` tells apart, each member with its own settings and what it builds.

A new workload is one class here, in the union at the end, and one line in `harness.catalog`.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, ClassVar, Literal, get_args

from pydantic import Field

from harness.plan_values import MAX_NAME
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
from workloads.single_task import TaskBenchmark
from workloads.strategyqa import TASK as STRATEGYQA
from workloads.truthfulqa import GEN as TRUTHFULQA_GEN
from workloads.truthfulqa import MC1 as TRUTHFULQA_MC1
from workloads.truthfulqa import MC2 as TRUTHFULQA_MC2


class NamedWorkload(Record):
    """What every workload of a plan has beside its own settings."""

    smaller_is_part: ClassVar[bool] = True
    """With a smaller limit it asks some of the items that it asks with a larger one, and can wherever that can."""

    asks_lengths: ClassVar[bool] = False
    """Whether its requests are lengths, so that they can be asked where no model reads them."""

    name: str
    label: str | None = Field(None, max_length=MAX_NAME)
    """What tables call it, in the place of its name."""

    @property
    def called(self) -> str:
        """By tables and messages."""
        return self.label or self.name

    def build(self, data_root: Path | None, allow_code: bool) -> Workload:
        """Raises `WorkloadError`, also where it runs code that a model wrote and `allow_code` does not let it."""
        raise NotImplementedError


class HellaSwagSpec(HellaSwagParameters, NamedWorkload):
    name: Literal["hellaswag"]

    def build(self, data_root: Path | None, allow_code: bool) -> Workload:
        return HellaSwag(self, data_root)


class BoolQSpec(BoolQParameters, NamedWorkload):
    name: Literal["boolq"]

    def build(self, data_root: Path | None, allow_code: bool) -> Workload:
        return BoolQ(self, data_root)


class MMLUSpec(MMLUParameters, NamedWorkload):
    name: Literal["mmlu"]

    def build(self, data_root: Path | None, allow_code: bool) -> Workload:
        return MMLU(self, data_root)


class ChosenTaskSpec(BenchmarkParameters, NamedWorkload):
    """One task whose answers are chosen among given ones."""

    name: Literal["truthfulqa_mc1", "truthfulqa_mc2", "mathqa", "strategyqa"]

    def build(self, data_root: Path | None, allow_code: bool) -> Workload:
        tasks = {
            "truthfulqa_mc1": TRUTHFULQA_MC1,
            "truthfulqa_mc2": TRUTHFULQA_MC2,
            "mathqa": MATHQA,
            "strategyqa": STRATEGYQA,
        }
        return TaskBenchmark(tasks[self.name], self, data_root)


class WrittenTaskSpec(GeneratingParameters, NamedWorkload):
    """One task whose answers the model writes."""

    name: Literal["truthfulqa_gen", "gsm8k", "gsm8k_cot", "gsm8k_cot_zeroshot", "aime24", "aime25"]

    def build(self, data_root: Path | None, allow_code: bool) -> Workload:
        tasks = {
            "truthfulqa_gen": TRUTHFULQA_GEN,
            "gsm8k": GSM8K,
            "gsm8k_cot": GSM8K_COT,
            "gsm8k_cot_zeroshot": GSM8K_COT_ZEROSHOT,
            "aime24": AIME24,
            "aime25": AIME25,
        }
        return TaskBenchmark(tasks[self.name], self, data_root)


class CodeTaskSpec(GeneratingParameters, NamedWorkload):
    """Programs, scored by running them."""

    name: Literal["humaneval", "humaneval_instruct", "mbpp_plus"]

    def build(self, data_root: Path | None, allow_code: bool) -> Workload:
        tasks = {"humaneval": HUMANEVAL, "humaneval_instruct": HUMANEVAL_INSTRUCT, "mbpp_plus": MBPP_PLUS}
        return CodeBenchmark(tasks[self.name], self, data_root, allow_code)


class AnyTaskSpec(AnyTaskParameters, NamedWorkload):
    name: Literal["lm_eval"]

    @property
    def called(self) -> str:
        """The task: of two tasks of lm-eval no table would say which is which."""
        return self.label or (self.task if len(self.task) <= MAX_NAME else self.name)

    def build(self, data_root: Path | None, allow_code: bool) -> Workload:
        return AnyTask(self, data_root)


class NeedleSpec(NeedleParameters, NamedWorkload):
    name: Literal["ruler_niah_single_1", "ruler_niah_multikey_2", "ruler_niah_multikey_3"]

    def build(self, data_root: Path | None, allow_code: bool) -> Workload:
        builders = {
            "ruler_niah_single_1": niah_single_1,
            "ruler_niah_multikey_2": niah_multikey_2,
            "ruler_niah_multikey_3": niah_multikey_3,
        }
        return builders[self.name](self, data_root)


class NeedleInHaystackSpec(NeedleInHaystackParameters, NamedWorkload):
    name: Literal["ruler_niah_single_2", "ruler_niah_single_3", "ruler_niah_multikey_1"]

    def build(self, data_root: Path | None, allow_code: bool) -> Workload:
        builders = {
            "ruler_niah_single_2": niah_single_2,
            "ruler_niah_single_3": niah_single_3,
            "ruler_niah_multikey_1": niah_multikey_1,
        }
        return builders[self.name](self, data_root)


class HaystackSpec(HaystackParameters, NamedWorkload):
    name: Literal["ruler_niah_multivalue", "ruler_niah_multiquery"]

    def build(self, data_root: Path | None, allow_code: bool) -> Workload:
        builders = {"ruler_niah_multivalue": niah_multivalue, "ruler_niah_multiquery": niah_multiquery}
        return builders[self.name](self, data_root)


class RulerSpec(RulerParameters, NamedWorkload):
    name: Literal["ruler_vt", "ruler_cwe", "ruler_fwe"]

    def build(self, data_root: Path | None, allow_code: bool) -> Workload:
        match self.name:
            case "ruler_vt":
                return RulerVariableTracking(self, data_root)
            case "ruler_cwe":
                return RulerCommonWords(self, data_root)
            case "ruler_fwe":
                return RulerFrequentWords(self, data_root)


class RulerQASpec(RulerParameters, NamedWorkload):
    # Questions whose documents do not fit are left out, and all of a smaller limit's may be such.
    smaller_is_part: ClassVar[bool] = False
    name: Literal["ruler_qa_squad", "ruler_qa_hotpot"]

    def build(self, data_root: Path | None, allow_code: bool) -> Workload:
        builders = {"ruler_qa_squad": qa_squad, "ruler_qa_hotpot": qa_hotpot}
        return builders[self.name](self, data_root)


class ShareGPTSpec(ShareGPTParameters, NamedWorkload):
    name: Literal["sharegpt"]

    def build(self, data_root: Path | None, allow_code: bool) -> Workload:
        return ShareGPT(self, data_root)


class MTBenchSpec(MTBenchParameters, NamedWorkload):
    name: Literal["mt_bench"]

    def build(self, data_root: Path | None, allow_code: bool) -> Workload:
        return MTBench(self, data_root)


class RoleBenchSpec(RoleBenchParameters, NamedWorkload):
    name: Literal["rolebench"]

    def build(self, data_root: Path | None, allow_code: bool) -> Workload:
        return RoleBench(self, data_root)


class FixedLengthsSpec(FixedLengthsParameters, NamedWorkload):
    asks_lengths: ClassVar[bool] = True
    name: Literal["fixed_lengths"]

    def build(self, data_root: Path | None, allow_code: bool) -> Workload:
        return FixedLengths(self, data_root)


class AzureTraceSpec(AzureTraceParameters, NamedWorkload):
    asks_lengths: ClassVar[bool] = True
    smaller_is_part: ClassVar[bool] = False
    """A smaller limit asks another stretch of the trace."""
    name: Literal["azure_trace"]

    def build(self, data_root: Path | None, allow_code: bool) -> Workload:
        return AzureTrace(self, data_root)


class FidelitySpec(FidelityParameters, NamedWorkload):
    name: Literal["fidelity"]

    def build(self, data_root: Path | None, allow_code: bool) -> Workload:
        return Fidelity(self, data_root)


WorkloadSpec = Annotated[
    HellaSwagSpec
    | BoolQSpec
    | MMLUSpec
    | ChosenTaskSpec
    | WrittenTaskSpec
    | CodeTaskSpec
    | AnyTaskSpec
    | NeedleSpec
    | NeedleInHaystackSpec
    | HaystackSpec
    | RulerSpec
    | RulerQASpec
    | ShareGPTSpec
    | MTBenchSpec
    | RoleBenchSpec
    | FixedLengthsSpec
    | AzureTraceSpec
    | FidelitySpec,
    Field(discriminator="name"),
]


def _by_name() -> dict[str, type[NamedWorkload]]:
    union, _ = get_args(WorkloadSpec)
    return {name: member for member in get_args(union) for name in get_args(member.model_fields["name"].annotation)}


SPEC_OF: dict[str, type[NamedWorkload]] = _by_name()
"""The member of the union that each name chooses."""
