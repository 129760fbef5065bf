"""Input preprocessing that runs beside training.

    from recom_jax import preprocess as pp, corun

    pipe = corun.Pipeline(prep, train_step)                 # prep: raw columns to a batch; train_step: the user's own
    for state, metrics in pipe.run(state, raw_batches):     # any iterable of dicts of numpy or pyarrow arrays
        ...
    print(pipe.plan)                                        # stages, kernels, shares, the device of each feature
    print(pipe.report())                                    # what a step took

docs/corun.md says how it works.
"""

from recom_jax.corun.markers import stage
from recom_jax.corun.measure import measure
from recom_jax.corun.options import Options
from recom_jax.corun.pipeline import Pipeline
from recom_jax.corun.plan import Plan
from recom_jax.corun.report import Report

__all__ = ["Options", "Pipeline", "Plan", "Report", "measure", "stage"]
