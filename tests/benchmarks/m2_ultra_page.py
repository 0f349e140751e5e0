"""The words of docs/measurements/m2-ultra-calibration.md, around the tables of `m2_ultra_calibration`."""

from __future__ import annotations

from engines.pricing.published_shapes import PHI_3_5_MOE as PHI
from harness.reproduce.npumoe import grid
from tests.benchmarks import m2_ultra_arms as arms
from tests.benchmarks import m2_ultra_calibration as calibration
from tests.benchmarks import m2_ultra_fits as fits


def page() -> str:
    free, comm, power = fits.fit_total_energy(), fits.fit_comm_power(), fits.fit_cpu_power()
    launch, byte, flop = fits.fit_npu_time().constants
    cpu_launch, cpu_byte, cpu_flop = fits.fit_cpu_gemm().constants
    ours, anemll = fits.TABLE_6_7["ours"], fits.TABLE_6_7["anemll"]
    ane_w = anemll[4] / anemll[2]
    residuals = calibration.ttft_residuals("skewed")
    every = arms.chunk_counts("skewed", 1024, 256)
    lowest, lowest_error = calibration.lowest_baseline()
    missed = calibration.missed_by()
    as_printed = arms.prefill(arms.TG, every, 256, arms.AS_TABLE_4)
    gpu_s = arms.prefill(arms.GPU, every, 256).now_s()
    cold_group = arms.mean_load(256) * 4
    return PAGE.format(
        constants=calibration.constants_section(),
        cpu_rows=calibration.cpu_section(),
        cpu_launch_ms=cpu_launch * 1e3,
        cpu_weights_ms=cpu_byte * fits.EXPERT_BYTES * 1e3,
        cpu_row_ms=cpu_flop * fits.FLOPS_PER_ROW * 1e3,
        cpu_attention_ms=(cpu_launch + cpu_byte * PHI.attention_weights * PHI.bytes_per_value) * 1e3,
        launch_ms=launch * 1e3,
        weights_ms=byte * fits.EXPERT_BYTES * 1e3,
        row_ms=flop * fits.FLOPS_PER_ROW * 1e3,
        time_rms=fits.fit_npu_time().rms,
        table_5=calibration.table_5_section(),
        naive_ms=fits.naive_launch_s() * 1e3,
        naive_rows=fits.naive_capacity(),
        free_w=free.constants[0],
        comm_w=comm.constants[0],
        comm_residuals=", ".join(calibration.percent(r) for r in comm.residuals),
        cpu_w=power.constants[0],
        ane_w=ane_w,
        cpu_s=ours[3] / power.constants[0],
        npu_s=ours[4] / ane_w,
        both_s=ours[3] / power.constants[0] + ours[4] / ane_w,
        ffn_8x32_ms=8 * calibration.expert_launch(8, 32)[0] * 1e3,
        table_4=calibration.table_4_section(),
        attention=calibration.attention_section(),
        imbalance=arms.imbalance(arms.chunk_counts("skewed", 1024, 256)),
        npu_group_ms=calibration.expert_launch(4, 32)[0] * 1e3,
        cpu_group_ms=4 * (cpu_launch + cpu_byte * fits.EXPERT_BYTES) * 1e3
        + cold_group * cpu_flop * fits.FLOPS_PER_ROW * 1e3,
        cpu_one_ms=(cpu_launch + cpu_byte * fits.EXPERT_BYTES) * 1e3,
        gpu_layer_s=gpu_s / PHI.n_layers,
        n_within=len([r for r in residuals if abs(r) <= 0.15]),
        n_stated=len(residuals),
        balanced_seconds=calibration.seconds_section("balanced"),
        skewed_seconds=calibration.seconds_section("skewed"),
        ttft=calibration.ratios_section("TTFT"),
        reproduced_routing=grid.ROUTING.name.removeprefix("generated, ").rpartition(",")[0],
        reproduced_naive=grid.ttft_gain("coreml-naive", 1024, 256),
        skewed_naive=arms.prefill(arms.NAIVE, every, 256).now_s() / arms.prefill(arms.TG, every, 256).now_s(),
        reproduced_dropped=grid.dropped_percent(grid.prefill("npumoe-tg", 1024, 256)),
        skewed_dropped=100 * calibration.dropped_share(calibration.counters(arms.TG, every, 256)),
        energy=calibration.ratios_section("energy"),
        lowest_256=lowest,
        lowest_256_error=calibration.percent(lowest_error),
        seconds_missed=" to ".join(map(calibration.percent, missed["seconds"])),
        joules_missed=" to ".join(map(calibration.percent, missed["joules"])),
        spinning_256=spinning_ratio(256),
        spinning_512=spinning_ratio(512),
        decode=calibration.decode_section(),
        checks=calibration.checks_section(),
        as_printed_mj=arms.total_j(as_printed) / 1024 * 1e3,
        as_printed_s=as_printed.now_s(),
    )


def spinning_ratio(chunk: int) -> float:
    """Energy of Core ML naive over TG at 1024 tokens, were the CPU busy while Core ML dispatches."""
    every = arms.chunk_counts("skewed", 1024, chunk)
    naive, ours = (arms.prefill(arm, every, chunk) for arm in (arms.NAIVE, arms.TG))
    launches = sum(len(list(arms.NAIVE.calls(counts, chunk, every))) for counts in every) * PHI.n_layers
    spun_j = launches * fits.naive_launch_s() * fits.fit_cpu_power().constants[0]
    return (arms.total_j(naive) + spun_j) / arms.total_j(ours)


PAGE = """\
# The sheets m2-ultra: how they were fitted, and where they miss their source

Made by `python -m tests.benchmarks.m2_ultra_calibration`. The source is NPUMoE (000-npumoe); we have no M2 Ultra, and
nothing here was measured by us. All fits are non-negative least squares of relative residuals on the source's tables
(`tests/benchmarks/m2_ultra_fits.py`). No end-to-end ratio of the source entered any fit, and nothing was tuned to one.

**In short.** There are two sheets. `m2-ultra` prices a prefill; `m2-ultra-table4` is the same with Table 4's scatter
and residual, which contradict everything else that the source says (on it, NPUMoE needs {as_printed_s:.0f} s and
{as_printed_mj:.0f} mJ a token; stated are 52 to 137 mJ), so it serves to reproduce Table 4 and nothing else. On
`m2-ultra`, absolute times and energies of the CPU and of NPUMoE land in or near the ranges that the source's figures
leave. Of the {n_stated} stated TTFT ratios, {n_within} come out within 15 % with skewed routing. The misses have a
pattern: every gain at chunk 1024 is too small, and so are the gains over the CPU and ANEMLL at 1024 tokens with chunk
256, which Tables 4 and 5 cannot give either. The ablation's 2.89 and 3.74 are far out of reach, and so is the energy of
Core ML naive.

## Fitted figures (s, B, FLOP, W, J)

The second reading is of somebody else, from the same tables, without our code: a cross-check, in no fit.

{constants}

The `stated` and `assumed` figures stand in the sheets with their origin. On `m2-ultra`, scatter and residual cost what
a gather costs: they are copies of the same rows.

CPU cycles cannot be had from these sheets: the source states no clock and no cycle count, so its cycle ratios are not
predictable.

## Dense products on the CPU: Tables 4, 6, 8

A CPU expert and CPU attention are the same dense product, so they share one line: {cpu_launch_ms:.2f} ms a call,
{cpu_weights_ms:.2f} ms for an expert's 150 MiB, {cpu_row_ms:.4f} ms a row of Phi-3.5-MoE.

{cpu_rows}

- Table 4 has 64 calls (four chunks of 16 experts, 32 rows each). Table 6 is read as one layer of Qwen3-30B-A3B in FP16
  over the same prompt: 512 calls of 16 rows. Its model, chunk and width are our reading.
- The last row of the fit is Table 8's NPU kernel times Table 6's CPU/NPU ratio of attention (0.095 s over 0.088 s). The
  second reading takes its price of a FLOP from this row alone, without the call and the weights that its line has too
  ({cpu_attention_ms:.1f} ms on ours), and so misses the row; ours is fitted on all five rows at once.
- Table 6's own attention times are not met by any line: the modelled CPU and NPU both take about half of them. What
  that attention is (masks, a cache of full length) is not said. Their ratio is what we use.
- §5.3 says instead that attention takes 27.6 % longer "depending on NPU or CPU backend", without saying which one is
  slower.
- The bare LM head has the same line (`assumed`).

## NPU launches: Table 5, serial

A launch of G experts with C rows each: t = a + G (w + C b), with 16 C tokens behind each printed value. a =
{launch_ms:.2f} ms a launch, w = {weights_ms:.2f} ms for an expert's 150 MiB, b = {row_ms:.4f} ms a row. RMS error
{time_rms:.1%} of time. The energies are those of the launch, communication included.

{table_5}

- The table's rounding alone is 1.6 % to 3.6 % of the time. Of the used rows, 1x32 and 1x64 are further off than
  theirs.
- **The fit covers 32 to 128 rows an expert.** 8x192 and 8x256 take more than linear time. They are not used, and
  launches of that size are priced too low. Chunk 1024 has experts of 256 rows: it lies outside the fit.
- Not used: the parallel column (it contradicts the serial design and the text on grouping), the row C=1..512 (its
  tokens are not stated).

**Core ML naive.** Where Core ML itself sends a graph to the NPU, a launch takes {naive_ms:.1f} ms more: Table 4's
3369.86 ms over 64 launches, less the line at {naive_rows:.0f} rows. The rows follow from the naive column's 1.62 ms of
padding, at the price of NPUMoE's 0.37 ms. It is the sheet's `s_per_naive_launch`.

## Where the watts go: Tables 5, 6, 7

- Communication is a constant {comm_w:.2f} W over wall time: errors {comm_residuals}, whether the NPU is used or not.
- Table 5 alone, without Table 7, gives {free_w:.2f} W of static power a launch. So communication and the NPU explain
  a launch: nothing is left for a CPU that waits, and the sheet has no waiting power.
- CPU: {cpu_w:.2f} W while it works (two runs, errors below 0.5 %).
- NPU in ANEMLL's attention: {ane_w:.2f} W (Table 7; not used, the shapes behind it are not stated).
- Check of the serial design: NPUMoE's CPU joules at {cpu_w:.2f} W are {cpu_s:.3f} s, its NPU joules at {ane_w:.2f} W
  {npu_s:.3f} s, together {both_s:.3f} s; its wall time is 0.572 s.
- Idle power is not stated. Waiting on the timeline costs 0 J, and the trace says so.

## One layer, prompt 1024, chunk 256: Table 4 on m2-ultra-table4

Per-operation times of one MoE block. The modelled routing is synthetic (seeded, busiest expert {imbalance:.2f} x the
mean); the source's is not published. NPUMoE is two groups of 8x32 a chunk: four chunks of them come to
{ffn_8x32_ms:.0f} ms by Table 5, where Table 4 prints 530.91. Core ML naive has 16 launches a chunk, at the capacity
that drops nothing.

{table_4}

- Fitted on this table: all of the CPU's rows. Predicted: NPUMoE's FFN, and the rows of naive launches (both columns'
  padding and dropping follow from the routing).
- Two groups of 8x32 have one slot for each routed pair; Table 3's padding needs 1.25. So the padding is too low here.
- Scatter and residual both come to 0.1 us a value, the cost of an element-by-element loop. They are scaled by valid
  rows and by tokens.
- Known discrepancy: the NPUMoE column adds up to 1707.4 ms, its total prints 2165.46.

## Attention: Table 8

On the NPU attention has the expert launches' constants, and Table 8 is a check of them. The shape of the kernel is not
stated; 512 rows of Phi-3.5-MoE is the static shape of Fig. 20, and the only one of the three that is near. The GPU's
FLOP price is fitted on its one kernel, and 66.8 W is printed (energy over time would be 72.7 W).

{attention}

The GPU has no price of a launch and none of its weights beyond the memory's bandwidth, because nobody states one. Take
ratios of dense kernels from it, no prefill: Table 9 has 0.99 s for an attention and MoE block on the GPU against 1.26 s
on the NPU, where Table 8's price gives {gpu_layer_s:.2f} s for a layer over 1024 tokens; and 4.48 times the NPU's
joules, where Table 8 has 1.87. That gap is the error that the sheet states for the GPU's joules.

## A whole prefill, priced as phi-3.5-moe on m2-ultra

With chunk B, the four most popular experts have 4 B/E rows and the twelve others 2 B/E (64 and 32 at chunk 256): TG in
groups of four, T one graph an expert, base one graph an expert of 4 B/E rows. Residency moves no group here: 4x32 takes
{npu_group_ms:.0f} ms on the NPU and {cpu_group_ms:.0f} ms on the CPU at its mean load. An expert with hardly a row
still takes {cpu_one_ms:.1f} ms there, but only in chunks in which it has one: a group goes to the CPU where its experts
are called less than three times a chunk. Here all are called in every chunk, so "all" is TG.

TTFT and energy a token:

Every expert with the same load:

{balanced_seconds}

Skewed routing:

{skewed_seconds}

### TTFT against the source

Residual: modelled over stated, less one; of a range, over its nearer end, and 0 inside it. Stated ratios are for
NPUMoE with all techniques.

{ttft}

- Tables 4 and 5 alone give 1.83 for the experts' FFN at 1024/256, so the stated 2.07 and 1.95 cannot follow from them.
- At 1024 tokens the source's gain falls from chunk 256 to 512 (2.07x to 1.32x), here too. At 4096 its gain rises from
  chunk 512 to 1024, where ours falls: the CPU gains more from larger chunks than the NPU does, and chunk 1024 lies
  outside the NPU's fit, whose line is too fast there.
- The source's gain at chunk 512 rises with the prompt (1.32x to 1.58x). That needs a fixed cost a prompt, which no
  table states; ours does not rise.
- [`joulebench reproduce`](../reproduce.md) prices these arms with another generated routing:
  {reproduced_routing}.
  There Core ML naive / TG is {reproduced_naive:.2f} at 1024 / 256 where the skewed one here has {skewed_naive:.2f}, and
  TG drops {reproduced_dropped:.1f} % where it drops {skewed_dropped:.1f} % here. The other two ratios agree, as they
  hang on no routing. The source publishes none, so neither is its own.

### Energy against the source

{energy}

- At 1024/256 §5.8 has one range for all baselines, 2.01 to 6.30. Its lower end must be Core ML CPU or ANEMLL, and the
  lower of these two comes to {lowest_256:.2f}: {lowest_256_error}.
- Energy of a naive dispatch is that of a waiting NPU and of communication, under 3 W; nobody says who works then. If
  the CPU did, at {cpu_w:.2f} W, naive / TG would be {spinning_256:.1f} at 1024/256 and {spinning_512:.1f} at 1024/512,
  where 6.30 and 7.37 are the highest stated: neither reading meets both.

## Decode: a token after a prompt of 1024

An extrapolation: no table has a call below 16 rows on the CPU or a launch below 32 rows on the NPU. The source states
no decode time. Its prefill share (80 %), its TTFT ratios (1.32 to 2.07) and its end-to-end ratio (1.26) leave 0.9 to 2
times the CPU's for NPUMoE.

{decode}

- What Core ML naive decodes with the source does not say; that arm decodes here as it fills the prompt, so with the
  largest graphs that its prefill launched. The preset does so too, with `decode_graphs = "same"`, its default.
- 1x16 is what `npumoe-t` takes where chunk 256 has a tier of 16 rows (0.5 of the mean load). No table has it.

## Other figures of the source, at 1024 tokens, chunk 256, skewed routing

Our TTFT ranges: Table 4's 530.91 and 969.53 ms for 32 layers, over Fig. 14's share of 86 %, and times 2.07 for the CPU.

{checks}

- The end-to-end ratios are "up to", over data sets with prompts of their own. At 1024 tokens ours are larger, because
  a decode step with 1x32 graphs is no slower here than the CPU's.
- With prefill graphs of four in decode, it would be far slower; which graphs the source decodes with is not said.

## What the model leaves out

Embedding, masks, sampling; padding of a static attention graph to the full chunk and to the cache's full length;
queueing and concurrency on the NPU; DVFS and heat.

## How certain is a modelled second or joule?

Nobody knows: the source states no error, and the residual of a fit is about the rows of that fit. So traces carry no
error, tables call nothing certain and no arm the best. What is known: ratios between arms, none of which any fit used,
come out {seconds_missed} (seconds: TTFT, ablation, end to end) and {joules_missed} (joules) off those of the source.
CPU joules are watts times modelled seconds, so they have the errors of both. The sheet has these four figures
(`missed_by`) and, for each price of weights, what it was fitted on (`fitted_flops_per_weight_byte`, the rows that a
weight meets; `fitted_weight_bytes`, of one launch). Operations outside are extrapolated: every trial tells their share
of its modelled seconds (`outside_fit_share` of trials.csv, `seconds_outside_fit` of operations.csv, a note in the
report). Decoding is outside but for graphs of 32 rows.
"""
