"""Scores and answers of lm-eval's `local-completions` and of its `hf`, as JSON.

python lm_eval_program.py URL TARGET FOLDER_OF_TASKS
"""

import json
import sys
from typing import Any

from lm_eval import simple_evaluate
from lm_eval.tasks import TaskManager

TASKS = ["choices", "continuations"]


def answers(manager: Any, kind: str, **options: Any) -> dict[str, Any]:
    """The model's answers to each request, by task."""
    results = simple_evaluate(model=kind, model_args=options, tasks=TASKS, task_manager=manager, bootstrap_iters=0)
    return {task: [sample["resps"] for sample in results["samples"][task]] for task in TASKS}


def main(url: str, target: str, tasks: str):
    manager = TaskManager(include_path=tasks, include_defaults=False)
    served = {"model": "byte-model", "base_url": f"{url}/v1/completions", "tokenizer": target, "max_length": 512}
    report = {
        "hf": answers(manager, "hf", pretrained=target, dtype="float32", device="cpu", max_length=512),
        "by token ids": answers(manager, "local-completions", **served, num_concurrent=2),
        "in batches": answers(manager, "local-completions", **served, batch_size=3),
        "by text": answers(manager, "local-completions", **served, tokenized_requests=False),
    }
    print(json.dumps(report))


if __name__ == "__main__":
    main(*sys.argv[1:])
