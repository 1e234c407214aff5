"""EleutherAI's lm-evaluation-harness, with a trained model as the one that answers. Importing this needs lm_eval."""

import pathlib
from collections.abc import Sequence
from typing import Any

from mecefo_jax.config_values import check_range
from mecefo_jax.errors import ConfigError, DataError
from mecefo_jax.evaluation.text_model import TextModel

try:
    import lm_eval
    from lm_eval.api.instance import Instance
    from lm_eval.api.model import LM
    from lm_eval.tasks import TaskManager
    from lm_eval.utils import make_table
except ImportError as error:
    raise ConfigError(
        f"the harness needs lm_eval, which cannot be imported ({error}); pip install -e '.[eval]'"
    ) from error


class HarnessModel(LM):
    """What the harness calls."""

    def __init__(self, model: TextModel) -> None:
        """Answers with a model."""
        super().__init__()
        self._model = model

    def loglikelihood(self, requests: list[Instance]) -> list[tuple[float, bool]]:
        """Of continuations given contexts, and whether greedy generation would give them."""
        return self._model.loglikelihoods([request.args for request in requests])

    def loglikelihood_rolling(self, requests: list[Instance]) -> list[float]:
        """Of whole texts."""
        return self._model.rolling_loglikelihoods([text for (text,) in (request.args for request in requests)])

    def generate_until(self, requests: list[Instance]) -> list[str]:
        """Greedy continuations."""
        return self._model.generations([request.args for request in requests])


class _Tasks(TaskManager):
    """The harness's tasks, and those of a folder."""

    def load(self, names: Any) -> Any:
        """Tasks with their documents, which may have to be downloaded."""
        try:
            return super().load(names)
        except Exception as error:  # whatever a task's own code, its files or the network raise
            reason = " ".join(str(error).split()) or type(error).__name__
            raise DataError(f"--tasks {','.join(names)}: cannot be loaded ({reason})") from error


def run_tasks(
    model: TextModel,
    tasks: Sequence[str],
    *,
    include_path: pathlib.Path | None = None,
    limit: int | None = None,
    num_fewshot: int | None = None,
) -> dict[str, Any]:
    """Evaluate on tasks of the harness.

    Args:
        model: which one.
        tasks: names of tasks, groups or tags, or patterns of them.
        include_path: folder with more tasks.
        limit: most documents of each task; None: all.
        num_fewshot: examples in front of each question; None: as many as a task asks for.

    Returns:
        What ``lm_eval.simple_evaluate`` does, with ``samples``.

    Raises:
        ConfigError: there is no such task, or it wants what the model cannot do.
        DataError: the documents of a task cannot be had, or not be encoded.
    """
    check_range("--limit", limit, at_least=1)
    check_range("--num-fewshot", num_fewshot, at_least=0)
    manager = _Tasks(include_path=None if include_path is None else str(include_path))
    for task in tasks:
        if not manager.match_tasks([task]):
            where = "" if include_path is None else f" and {include_path}"
            raise ConfigError(f"--tasks: the harness{where} has no task {task}; lm_eval ls tasks lists them")
    results = lm_eval.simple_evaluate(
        model=HarnessModel(model),
        tasks=manager.match_tasks(list(tasks)),
        limit=limit,
        num_fewshot=num_fewshot,
        task_manager=manager,
    )
    assert results is not None  # of other processes than the first alone
    return dict(results)


def results_table(results: dict[str, Any]) -> str:
    """The harness's own table of results, and one of groups where there are any."""
    return "\n".join(make_table(results, key) for key in ("results", "groups") if results.get(key))
