"""How many beginnings of next turns an executor has computed ahead."""

import httpx

from lab.executor_client import ANSWER_TIMEOUT_S
from lab.stack.executor_process import ExecutorProcess

COMPUTED = 'evenflow_executor_next_prefixes_total{result="computed"}'


async def num_computed_ahead(executor: ExecutorProcess) -> float:
    async with httpx.AsyncClient(timeout=ANSWER_TIMEOUT_S) as http:
        metrics = await http.get(f"http://127.0.0.1:{executor.metrics_port}/metrics")
    lines = [line for line in metrics.text.splitlines() if line.startswith(COMPUTED)]
    return float(lines[0].split()[-1]) if lines else 0.0
