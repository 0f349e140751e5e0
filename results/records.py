"""The vocabulary of a run: immutable records that reject unknown fields.

Units stand in the names (`_s _j _w _bytes`); times are seconds on the run's one monotonic clock. A figure that
could not be obtained is None beside a `reason`, never 0. What was asked for (a technique, a placement) and what was
observed (`results.counters`) are separate records.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Any, Final, Literal

import numpy as np
from numpy.typing import NDArray
from pydantic import BaseModel, ConfigDict

from results.latencies import first_token_s, gaps_s, lasting_s, per_token_s

Method = Literal[
    "counter",
    "integrated power",
    "battery gauge",
    "relative gauge",
    "modelled",
    "replayed",
    "measured",
    "derived",
    "missing",
]
"""How a figure came to be. `measured` is for clocks, memory and scores, `derived` for sizes that follow from what was
loaded and for times that follow from a speed or another time; the others are for energy. Never mixed in one row."""
OF_A_RECORDING = "the joules are of a recording, which does not know the arms"
"""Why nothing is certain of `replayed` joules: an arm that takes longer hears more of the recording."""
DerivedTime = Literal["first token", "prefill", "decode"]

BACK = ":back"
"""Behind the name of a modelled duplex link: its way from target to source. Both ways draw the link's energy."""
COMM = "comm"
"""The component that holds what the source of a sheet books as communication; no unit and no link."""
Phase = Literal["prefill", "decode", "all"]
PHASES: tuple[Phase, ...] = ("prefill", "decode", "all")


class Record(BaseModel):
    """Base of all records: frozen, and an unknown field is an error.

    JSON keeps NaN and infinities (a log-likelihood may be -inf): as null they would not come back.
    """

    model_config = ConfigDict(frozen=True, extra="forbid", ser_json_inf_nan="constants")


# --- what is asked ---------------------------------------------------------------------------------------------------


class Cell(Record):
    """One point of the plan's matrix: an engine with its technique, a workload, a device."""

    technique_line: str | None = None
    """What the technique does, in one line. None: not recorded."""

    cell_id: str
    """Short hash of everything below: the same cell keeps its id over runs of the same plan."""
    label: str
    engine: str
    technique: str
    technique_parameters: dict[str, Any]
    technique_changes: dict[str, Any] | None = None
    """Of the parameters, those that are not the technique's own, for names of arms; of a choice spelled out its kind,
    and its parameters as `layout.rows`. None: not recorded, so that all of them are told."""
    placement: str
    model: str
    model_note: str | None = None
    """What a reader must know before believing an accuracy, such as "random weights"."""
    workload: str
    workload_parameters: dict[str, Any]
    device: str
    engine_parameters: dict[str, Any] = {}
    reference_id: str | None = None
    """The cell that this one's answers are compared with: the same model and workload, nothing left out or narrowed.
    Its own id where it is that cell; None where the plan has none."""


TOP_K_OF_TRANSFORMERS = 50
"""What a draw is made from where nobody says it."""


class Sampling(Record):
    """How the next token is drawn. Temperature 0 is greedy."""

    temperature: float = 0.0
    top_p: float = 1.0
    top_k: int = 0
    seed: int = 0


class Request(Record):
    """One call of the engine. A sample of a multiple-choice task makes several."""

    request_id: str
    sample_id: str
    """Joins latency, energy and score of the same item, also over arms: it depends on the data only."""
    kind: Literal["generate", "loglikelihood"]
    prompt_ids: tuple[int, ...]
    continuation_ids: tuple[int, ...] = ()
    """`loglikelihood` only: the tokens whose probability is asked."""
    max_new_tokens: int = 0
    stop: tuple[str, ...] = ()
    sampling: Sampling = Sampling()
    ignore_end_tokens: bool = False
    """`generate` only: no end token ends the answer, so that without stop strings it has exactly `max_new_tokens`."""
    follows: str | None = None
    """request_id of an earlier request whose conversation this one continues: the prompt is that one's prompt, the
    answer that was given to it, and then `prompt_ids` (`results.requests`). Engines never see it."""
    arrival_s: float | None = None
    """Seconds after the window's start at which it is there to be answered. None: once the one before is answered."""


class Sample(Record):
    """What a sample asks, in words, for people. Requests hold token ids only; scores say what was right."""

    sample_id: str
    question: str
    expected: str | None = None
    """The right answer; None where there is none, or none was told."""
    choices: tuple[str, ...] = ()
    """Of a multiple-choice task, in the order of its requests."""


# --- what was seen ---------------------------------------------------------------------------------------------------


class Completion(Record):
    """What the engine did with one request, on the run's clock.

    For a log-likelihood the whole call is prefill: `first_token_s` and `token_times_s` stay empty.
    """

    request_id: str
    sample_id: str
    n_prompt_tokens: int
    """Tokens the answer stands on (prompt, plus the continuation of a log-likelihood, whose last token is not read)."""
    start_s: float
    prefill_end_s: float
    """End of the prefill phase: the first token is out (generate) or the logits are (log-likelihood)."""
    end_s: float
    token_ids: tuple[int, ...] = ()
    token_times_s: tuple[float, ...] = ()
    text: str = ""
    loglikelihood: float | None = None
    is_greedy: bool | None = None
    n_cached_tokens: int = 0
    """Of the prompt tokens, those that were not computed: the engine held them from the request before."""
    arrival_s: float | None = None
    """When the request arrived, where the workload says it; between this and `start_s` it waited in the queue."""
    set_aside_s: tuple[tuple[float, float], ...] = ()
    """Stretches around and within the request that are of no phase, ascending and disjoint: the program that answers
    was started, loaded its model, or read the prompt again for a call of its own. In no latency, and in no joules."""
    derived: tuple[DerivedTime, ...] = ()
    """Of its times, those that no clock told: the first token counted as the prompt's end, a phase as tokens over a
    speed that was told."""
    is_spread: bool = False
    """Of `token_times_s` only the first and the last are known: those between are spread evenly over that time."""
    edges_uncertainty_s: float | None = 0.0
    """Standard uncertainty of when its phases began and ended, where another clock, or a delay of a link, is between
    them and the run's clock. How long they lasted is known better: they come earlier or later as a whole. None: not
    known, and in no joules: they ended with a program of which nothing but its end was seen, and so may be earlier."""

    @property
    def n_computed_tokens(self) -> int:
        """Prompt tokens pushed through prefill."""
        return self.n_prompt_tokens - self.n_cached_tokens

    @property
    def n_generated(self) -> int:
        return len(self.token_ids)

    @property
    def ttft_s(self) -> float | None:
        """Time to first token; None for a log-likelihood, which emits none."""
        return first_token_s(self.start_s, self.token_times_s, self.set_aside_s)

    @property
    def queueing_s(self) -> float | None:
        """From arrival until the engine took it; None where requests do not arrive by themselves."""
        return None if self.arrival_s is None else self.start_s - self.arrival_s

    @property
    def ttft_from_arrival_s(self) -> float | None:
        """TTFT under load: what a client waits for the first token, the queue included."""
        return None if self.queueing_s is None or self.ttft_s is None else self.queueing_s + self.ttft_s

    @property
    def e2e_from_arrival_s(self) -> float | None:
        """What a client waits for the whole answer, the queue included."""
        return None if self.queueing_s is None else self.queueing_s + self.e2e_s

    @property
    def e2e_s(self) -> float:
        return lasting_s(self.start_s, self.end_s, self.set_aside_s)

    @property
    def tpot_s(self) -> float | None:
        """Time per output token; None where no token came later than the first."""
        return per_token_s(self.token_times_s, self.set_aside_s)

    @property
    def itl_s(self) -> tuple[float, ...]:
        """Inter-token latencies; none where tokens have no stamps of their own."""
        return gaps_s(self.token_times_s, self.is_spread)


class ActiveWeights(Record):
    """The weights that one token needs, as the engine stores them: of the experts only as many as are chosen, of the
    embedding nothing, because a row of it is looked up."""

    n_parameters: int
    """Of all layers and the last norm."""
    n_bytes: int
    head_parameters: int
    head_bytes: int
    prompt_parameters: int | None = None
    """What a prompt's token needs of the layers, where the last one leaves out most of those that nobody asks about;
    None where it needs them all."""


NO_MODEL = "no model ran"
"""The note on a model that is only a shape, whose routing was played: it answered nothing that could be right."""
PRICED_AS = " priced as "
"""In a cell's model: between the one that computes and the shape that a sheet prices."""
MODEL_PREFIX: Final = "model:"
"""Before the sheet in the name of a modelled device."""


TraceKind = Literal["power", "counter", "held", "raw"]
"""power: watts at an instant; counter: joules so far; held: watts that stand until the gauge's next update; raw: what
a gauge said before its unit and sign were decided, kept beside the power that follows from it, and no energy."""


@dataclass(frozen=True)
class PowerTrace:
    """Raw readings of one component of one meter. Joules are derived from it in `results.energy`, never here.

    values: W for `power` and `held`, J for `counter`; of a relative gauge, units of its own a second.
    """

    meter: str
    component: str
    kind: TraceKind
    method: Method
    times_s: NDArray[np.float64]
    values: NDArray[np.float64]
    sample_interval_s: float
    """The interval asked of the sampler."""
    update_period_s: float = 0.0
    """How often the hardware renews the value; 0 where every reading is fresh."""
    resolution: float = 0.0
    """Smallest step of `values`, in their unit."""
    relative_accuracy: float | None = 0.0
    """Gain error of the meter as its maker or sheet states it, one sigma. None: not stated, so that joules of it
    have no stated uncertainty."""
    wrap_at_j: float | None = None
    """Counters only: the value at which it starts again from 0."""
    additive: bool = True
    """False for a component contained in another of the same meter (a core domain inside its package)."""
    note: str | None = None
    can_rest: bool = False
    """The part may be switched off while the machine runs: that it stands still may be true."""
    has_lived: bool = False
    """Before these readings it was seen to count, or to show power: where it shows none in them, it has stopped."""
    max_power_w: float | None = None
    """More cannot flow there; None where the meter states no limit."""
    gaps_s: tuple[tuple[float, float], ...] = field(default=())
    """Stretches without a reading, recorded by the sampler."""
    basis: str | None = None
    """Of a raw trace: what turns it into joules besides its values, as JSON: a watts sheet, a list of operations."""
    averaged_s: float | None = None
    """Of power that is known to be means: of so long before each renewal. None: of instants, or nobody says."""
    left_out: str | None = None
    """How many readings are not among these, and why."""


class EnergyReading(Record):
    """Energy of one phase of one window, derived from the raw traces of one meter."""

    phase: Phase
    meter: str
    component: str
    method: Method
    duration_s: float
    energy_j: float | None = None
    uncertainty_j: float | None = None
    """One standard uncertainty."""
    net_energy_j: float | None = None
    """Above the idle baseline: E - P_idle * t; None without a baseline."""
    net_uncertainty_j: float | None = None
    gauge_units: float | None = None
    """Of a relative gauge alone: the amount in units of its own. Never joules: `energy_j` stays None beside it."""
    gauge_units_uncertainty: float | None = None
    """One standard uncertainty."""
    relative_gain_error: float | None = None
    """The part of the uncertainty that all windows of the meter share, over the amount. None where it is not known."""
    charge_uah: float | None = None
    """That a battery gave, where its gauge's voltage was kept. Its relative uncertainty is that of the joules."""
    p90_power_w: float | None = None
    """Of the whole window and the meter's total: power stays below it 90 % of the time."""
    p90_power_reason: str | None = None
    """Why there is none."""
    reason: str | None = None
    """Why a figure is None."""
    remark: str | None = None
    """What stands behind the figure besides its readings: a stretch that was filled in, a part that was at rest."""

    @property
    def unshared_uncertainty(self) -> float:
        """Standard uncertainty, in the unit of its amount, without the gain error that all windows of the meter
        share: repeats do not narrow it. 0 where none is stated."""
        relative = self.method == "relative gauge"
        stated = (self.gauge_units_uncertainty if relative else self.uncertainty_j) or 0.0
        amount = (self.gauge_units if relative else self.energy_j) or 0.0
        return math.sqrt(max(stated**2 - ((self.relative_gain_error or 0.0) * amount) ** 2, 0.0))

    @property
    def average_power_w(self) -> float | None:
        return self.energy_j / self.duration_s if self.energy_j is not None and self.duration_s > 0 else None


class IdleBaseline(Record):
    """Power of the machine doing nothing for us, before and after the window, in the same state."""

    meter: str
    component: str
    before_w: float | None = None
    after_w: float | None = None
    uncertainty_w: float | None = None
    """Without the meter's gain error, which the window shares."""
    strays_j2_per_s: float | None = None
    """Variance of idle energy per second, as pieces of idle times tell; None where the meter is too slow for them."""
    parts: tuple[str, ...] | None = None
    """Of a total: those that lived in it; the others count as 0 J. None where it is not known."""
    reason: str | None = None
    """Why a side is None."""
    remark: str | None = None
    """What stands behind the watts besides readings: a stretch that was filled in, a part that was at rest."""

    @property
    def power_w(self) -> float | None:
        """None with one side alone: nothing says how far the idle power drifted."""
        return None if self.before_w is None or self.after_w is None else (self.before_w + self.after_w) / 2

    @property
    def drift_w(self) -> float | None:
        return None if self.before_w is None or self.after_w is None else self.after_w - self.before_w


class Score(Record):
    """One metric of one sample, or of the whole task when `sample_id` is None (lm-eval's own aggregate)."""

    metric: str
    value: float
    sample_id: str | None = None
    stderr: float | None = None
    n: int = 1
    higher_is_better: bool = True


class Divergence(Record):
    """How far an arm's next-token distributions are from the reference arm's, over the positions of one sample."""

    sample_id: str
    n_positions: int
    kl_nats: float
    """Mean of KL(reference || arm)."""
    same_top1: float
    """Share of positions with the same likeliest token."""
