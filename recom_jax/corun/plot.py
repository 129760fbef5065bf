"""The picture of a plan: one lane for the step's stages and one for each device's kernels."""

from __future__ import annotations

import os

from recom_jax.corun.plan import AFTER, Plan


def plot(plan: Plan, path: str | os.PathLike[str]) -> None:
    """Writes the timeline of `plan` to `path`; the file's ending names its type (png, svg, pdf)."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(11, 1.6 + 0.6 * plan.gpus), layout="constrained")
    axes = figure.add_subplot()
    start, begin = 0.0, {}
    shades = ("#b7c9e2", "#d5dff0")
    for k, stage in enumerate(plan.stages):
        begin[stage.name] = start
        axes.broken_barh(
            [(start, stage.duration_us)], (-0.4, 0.8), color=shades[k % 2], edgecolor="white"
        )
        axes.text(
            start + stage.duration_us / 2,
            0,
            stage.name,
            ha="center",
            va="center",
            fontsize=7,
            clip_on=True,
        )
        start += stage.duration_us
    begin[AFTER] = start
    for kernel in plan.kernels:
        at = begin[kernel.stage] + kernel.start_us
        late = kernel.stage == AFTER
        height = 0.15 + 0.65 * kernel.share
        axes.broken_barh(
            [(at, kernel.duration_us)],
            (kernel.gpu + 1 - height / 2, height),
            color="#c0504d" if late else "#6aa56a",
            edgecolor="white",
        )
    axes.set_yticks(
        range(plan.gpus + 1), ["train step", *(f"device {g}: prep" for g in range(plan.gpus))]
    )
    axes.invert_yaxis()
    axes.axvline(plan.ideal_us, color="#888888", linewidth=0.8, linestyle="--")
    axes.set_xlim(0, max(plan.predicted_us, plan.ideal_us) * 1.02 or 1)
    axes.set_xlabel(
        "microseconds; a bar's height is the share of the device; dashed: the step without preprocessing"
    )
    axes.set_title(
        f"{len(plan.ops)} operators in {len(plan.kernels)} kernels: predicted step {plan.predicted_us:.0f} us, "
        f"sequential {plan.sequential_us:.0f}, {plan.hidden:.0%} hidden",
        fontsize=9,
    )
    figure.savefig(os.fspath(path))
