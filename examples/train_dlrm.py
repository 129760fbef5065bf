"""Trains DLRM or DCN-v2 on Criteo rows that are preprocessed beside the step.

    python -m examples.train_dlrm --steps 300                              # made-up rows
    python -m examples.train_dlrm --data train.txt --model dcnv2           # Criteo's TSV, DeepCTR's CSV, or parquet
    python -m examples.train_dlrm --checkpoint run --every 100             # interrupt it, then add --resume

Each batch is predicted before it is trained on, so log loss and AUC are those of rows never seen. Checkpoints are
written with Orbax if it is installed, else as a numpy .npz file. A resumed run goes on at the saved place.
"""

import argparse
import dataclasses
import itertools
import pathlib
import sys
from collections.abc import Callable, Iterable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from examples.click_models import MODELS, ClickModel, auc
from examples.criteo import CATEGORIES, DENSE
from examples.criteo_raw import RawCriteo, RawParquet, ZipfRows
from recom_jax import corun
from recom_jax import preprocess as pp

CONSOLE = Console(width=None if sys.stdout.isatty() else 110)


def make_prep(rows: tuple[int, ...]) -> Callable[[Any], Any]:
    """Criteo's usual preprocessing: ``log1p(max(x, 0))``, and a hash for each category that has a table."""

    def prep(raw: Any) -> Any:
        dense = [pp.log1p(pp.clamp(pp.fill_null(raw[n], 0.0), 0.0, 1e30)) for n in DENSE]
        ids = [
            pp.sigrid_hash(pp.fill_null(raw[n], -1), salt=k, max_value=size)
            for k, (n, size) in enumerate(zip(CATEGORIES, rows, strict=False))
        ]
        return {"label": raw["label"], "dense": jnp.stack(dense, 1), "ids": jnp.stack(ids, 1)}

    return prep


def open_rows(path: str | None, batch_size: int, steps: int, seed: int) -> Iterable[Any]:
    """Raw batches of a file by its ending, or made-up ones."""
    if path is None:
        return ZipfRows(steps, batch_size, seed=seed)
    if path.endswith(".parquet"):
        return RawParquet(path, batch_size)
    return RawCriteo(path, batch_size)


@dataclasses.dataclass
class History:
    """What a run reports: a loss for each step, and scores and labels for the AUC."""

    losses: list[float] = dataclasses.field(default_factory=list)
    scores: list[np.ndarray] = dataclasses.field(default_factory=list)
    labels: list[np.ndarray] = dataclasses.field(default_factory=list)

    def add(self, metrics: Any) -> None:
        self.losses.append(float(metrics["loss"]))
        self.scores.append(np.asarray(metrics["logits"]))
        self.labels.append(np.asarray(metrics["label"]))

    def summary(self, last: int = 100) -> str:
        if not self.losses:
            return "no steps"
        area = auc(np.concatenate(self.scores[-last:]), np.concatenate(self.labels[-last:]))
        n = min(last, len(self.losses))
        loss = np.mean(self.losses[-last:])
        return f"log loss {loss:.4f}, AUC {area:.4f} over the last {n} batches, before training on them"


# ---- checkpoints ---------------------------------------------------------------------------------------------


def save(folder: pathlib.Path, state: Any, position: int) -> str:
    """Saves a state and the place in the stream; says how."""
    folder.mkdir(parents=True, exist_ok=True)
    tree = {"state": state, "position": np.array(position, np.int64)}
    try:
        import orbax.checkpoint as ocp
    except ImportError:
        with (folder / "new.npz").open("wb") as file:
            np.savez(file, *map(np.asarray, jax.tree.leaves(tree)))
        (folder / "new.npz").replace(folder / "checkpoint.npz")  # a crash leaves the old one whole
        return (
            f"{folder / 'checkpoint.npz'} (numpy; install orbax-checkpoint for sharded checkpoints)"
        )
    with ocp.StandardCheckpointer() as writer:
        writer.save((folder / "orbax").absolute(), tree, force=True)
    (folder / "checkpoint.npz").unlink(missing_ok=True)  # an older one
    return f"{folder / 'orbax'} (Orbax)"


def restore(folder: pathlib.Path, like: Any) -> tuple[Any, int]:
    """The saved state (of the structure, shapes and dtypes of `like`) and the place in the stream."""
    tree = {"state": like, "position": np.array(0, np.int64)}
    if (folder / "checkpoint.npz").exists():
        wanted, shape = jax.tree.flatten(tree)
        with np.load(folder / "checkpoint.npz") as file:
            if len(file.files) != len(wanted):
                raise ValueError(f"{folder}: {len(file.files)} arrays, the model has {len(wanted)}")
            leaves = [file[f"arr_{k}"] for k in range(len(wanted))]
        for have, want in zip(leaves, wanted, strict=True):
            if (have.shape, have.dtype) != (want.shape, want.dtype):
                raise ValueError(
                    f"{folder}: an array is {have.dtype}{have.shape}, the model has {want.dtype}{want.shape}"
                )
        made = jax.tree.unflatten(shape, leaves)
        return jax.tree.map(jnp.asarray, made["state"]), int(made["position"])
    if not (folder / "orbax").exists():
        raise FileNotFoundError(f"no checkpoint in {folder}; run without --resume first")
    import orbax.checkpoint as ocp

    with ocp.StandardCheckpointer() as reader:
        try:
            found = reader.restore((folder / "orbax").absolute(), tree)
        except ValueError as why:
            raise ValueError(f"{folder}: not what the model has: {why}") from why
    return found["state"], int(found["position"])


# ---- the run -------------------------------------------------------------------------------------------------


def train(
    model: ClickModel,
    rows: Iterable[Any],
    *,
    steps: int | None = None,
    options: corun.Options | None = None,
    checkpoint: pathlib.Path | None = None,
    every: int = 0,
    resume: bool = False,
    show: bool = False,
) -> tuple[Any, History, corun.Pipeline]:
    """Trains on raw batches; returns the state, what was reported, and the pipeline.

    Args:
      steps: at most this many batches of the stream, those before a resumed run included; None: all.
      checkpoint, every, resume: a folder; save after each so many steps (and at the end); go on from what is there.
    """
    pipe = corun.Pipeline(
        make_prep(model.rows), jax.jit(model.step, donate_argnums=0), options=options
    )
    state, start, history = model.init(), 0, History()
    if resume and checkpoint is not None:
        state, start = restore(checkpoint, state)
    left = None if steps is None else max(0, steps - start)
    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeRemainingColumn(),
    )
    with Progress(*columns, console=CONSOLE, disable=not show, transient=True) as bar:
        task = bar.add_task("training", total=left)
        run = pipe.run(state, rows, start=start)
        try:
            for made, metrics in itertools.islice(run, left):
                state = made
                history.add(metrics)
                bar.update(task, advance=1, description=f"log loss {history.losses[-1]:.4f}")
                if checkpoint is not None and every and pipe.position % every == 0:
                    save(checkpoint, state, pipe.position)
        finally:
            run.close()
    if checkpoint is not None:
        # With nothing left the run did not begin, and the pipeline has no position yet.
        where = save(checkpoint, state, pipe.position if history.losses else start)
        if show:
            CONSOLE.print(f"saved: {where}")
    return state, history, pipe


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser("python -m examples.train_dlrm", description=__doc__)
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument(
        "--data", help="Criteo's TSV, DeepCTR's CSV (.gz too) or .parquet; default: made-up rows"
    )
    parser.add_argument("--model", choices=sorted(MODELS), default="dlrm")
    parser.add_argument("--optimizer", choices=("sgd", "adagrad"), default="sgd")
    parser.add_argument("--rate", type=float, default=0.1)
    parser.add_argument(
        "--steps", type=int, default=None, help="batches at most (made-up rows: 200)"
    )
    parser.add_argument("--batch", type=int, default=1024)
    parser.add_argument("--rows", type=int, default=20_000, help="of each table")
    parser.add_argument("--dim", type=int, default=16)
    parser.add_argument(
        "--fields", type=int, default=len(CATEGORIES), help="categories with a table"
    )
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--checkpoint", type=pathlib.Path)
    parser.add_argument("--every", type=int, default=0, help="save after so many steps")
    parser.add_argument("--resume", action="store_true")
    parser.add_argument("--plot", type=pathlib.Path, help="draw the plan here")
    a = parser.parse_args(arguments)
    if a.resume and a.checkpoint is None:
        parser.error("--resume needs --checkpoint")
    fields = min(max(a.fields, 1), len(CATEGORIES))
    model = MODELS[a.model]((a.rows,) * fields, a.dim, optimizer=a.optimizer, rate=a.rate)
    steps = a.steps if a.steps is not None or a.data else 200
    rows = open_rows(a.data, a.batch, steps or 0, a.seed)
    _, history, pipe = train(
        model, rows, steps=steps, checkpoint=a.checkpoint, every=a.every, resume=a.resume, show=True
    )
    CONSOLE.print(f"{len(history.losses)} steps: {history.summary()}")
    if history.losses:
        CONSOLE.print(str(pipe.plan))
        CONSOLE.print(str(pipe.report()))
        if a.plot:
            pipe.plan.plot(a.plot)


if __name__ == "__main__":
    main()
