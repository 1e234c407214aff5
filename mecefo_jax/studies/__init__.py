"""Studies: the tables of docs/results, each from the runs that it needs to Markdown, CSV and plot."""

from mecefo_jax.studies import ablation, convergence, failures, gradient_error, perplexity, throughput
from mecefo_jax.studies.study import Study

STUDIES: dict[str, Study] = {
    "perplexity": perplexity.STUDY,
    "persistent": failures.PERSISTENT,
    "frequency": failures.FREQUENCY,
    "ablation": ablation.STUDY,
    "gradient_error": gradient_error.STUDY,
    "throughput": throughput.STUDY,
    "convergence": convergence.STUDY,
}
"""By the name of the table."""
