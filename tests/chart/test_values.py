"""What bad values get: one sentence from the schema or from the chart, and no objects."""

import re

import pytest

from lab.chart_tools import ChartError
from tests.charts import EXAMPLES, render

SIDECAR = ["--values", str(EXAMPLES["sidecar"])]


def refusal(*arguments: str) -> str:
    with pytest.raises(ChartError) as caught:
        render(*arguments)
    return str(caught.value)


@pytest.mark.parametrize(
    ("mistyped", "named"),
    [
        ("topolgy=apart", "topolgy"),
        ("topology=aside", "/topology"),
        ("gateway.replica=2", "replica"),
        ("gateway.drainSeconds=long", "/gateway/drainSeconds"),
        ("gateway.settings.MAX_LIVE_REQUEST=1", "MAX_LIVE_REQUEST"),
        ("pools[0].model=m,pools[0].name=a,pools[0].gpu=1", "gpu"),
        ("pools[0].model=m,pools[0].name=A", "/pools/0/name"),
        ("poolDefaults.settings.DTYP=auto", "DTYP"),
        ("poolDefaults.settings.TRACKER=elsewhere", "TRACKER"),  # the chart's own
        ("redis.url=redis://a", "url"),
        ("certificates.mode=self", "/certificates/mode"),
    ],
)
def test_a_typo_is_refused_by_the_schema(mistyped: str, named: str) -> None:
    said = refusal("--set", mistyped)

    assert "values don't meet the specifications of the schema" in said
    assert named in said


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (
            [*SIDECAR, "--set", "poolDefaults.nodes=2"],
            "pool qwen: topology sidecar has one node per executor, because its gateway is in the "
            "executor's pod; nodes is 2",
        ),
        (
            ["--set", "pools[0].name=a,pools[0].model=m,pools[0].tensorParallelSize=4"],
            "pool a: tensorParallelSize x pipelineParallelSize is 4, and gpus x nodes only 1",
        ),
        (
            [
                "--set",
                "pools[0].name=a,pools[0].model=m,pools[0].gpus=2,pools[0].nodes=2,"
                "pools[0].tensorParallelSize=2,pools[0].pipelineParallelSize=4",
            ],
            "pool a: tensorParallelSize x pipelineParallelSize is 8, and gpus x nodes only 4",
        ),
        (
            ["--set", "poolDefaults.nodes=2"],
            "pool main: nodes is 2, and this chart runs an engine on one node",
        ),
        (
            ["--set", "gateway.terminationGracePeriodSeconds=300"],
            "gateway: terminationGracePeriodSeconds is 300, and lame duck, drain and end take up "
            "to 340",
        ),
        (
            [
                "--set",
                "poolDefaults.drainSeconds=120,poolDefaults.terminationGracePeriodSeconds=90",
            ],
            "pool main: terminationGracePeriodSeconds is 90, and drain and end take up to 150",
        ),
        (
            ["--set", "poolDefaults.autoscaling.kind=keda,monitoring.serviceMonitor=true"],
            "pool main: autoscaling by keda needs monitoring.prometheusUrl, or there are no "
            "metrics to scale by",
        ),
        (
            ["--set", "poolDefaults.autoscaling.kind=hpa"],
            "pool main: autoscaling by hpa needs monitoring.serviceMonitor, or there are no "
            "metrics to scale by",
        ),
        (
            ["--set", "poolDefaults.autoscaling.minReplicas=9"],
            "pool main: autoscaling.minReplicas is 9, and maxReplicas 4",
        ),
        (
            ["--set", "gateway.autoscaling.enabled=true,gateway.resources.requests.cpu=null"],
            "gateway.autoscaling: resources.requests.cpu is what the processor's use is measured "
            "by, and there is none",
        ),
        (
            ["--set", "gateway.autoscaling.enabled=true,gateway.autoscaling.minReplicas=9"],
            "gateway.autoscaling: minReplicas is 9, and maxReplicas 8",
        ),
        (
            [*SIDECAR, "--set", "gateway.autoscaling.enabled=true"],
            "gateway.autoscaling: in topology sidecar there are as many gateways as executors",
        ),
        (
            [*SIDECAR, "--set", "gateway.open=false"],
            "gateway: topology sidecar needs open: true, because an endpoint picker reads /metrics "
            "without an API key; the inference gateway asks for keys",
        ),
        (
            [*SIDECAR, "--set", "poolDefaults.inferencePool.endpointPicker="],
            "pool qwen: topology sidecar needs inferencePool.endpointPicker, the service that "
            "chooses pods",
        ),
        (
            ["--set", "gateway.apiKeys.secretName="],
            "gateway: apiKeys.secretName, apiKeys.redis or open: true is needed, or no client "
            "could call",
        ),
        (
            ["--set", "gateway.httpRoute.enabled=true"],
            "gateway.httpRoute: it needs parentRefs, and topology apart",
        ),
        (
            ["--set", "networkPolicy.enabled=false"],
            "redis: without network policies it needs passwordSecret, or any pod of the cluster "
            "could write to it",
        ),
        (
            ["--set", "poolDefaults.gpus=1,pools[0].name=a,pools[0].model=m,pools[0].device=cpu"],
            "pool a: device cpu uses no GPUs, and gpus is 1",
        ),
        (
            ["--set", "poolDefaults.kvEvents.port=5557"],
            "pool main: kvEvents tell of vLLM's own prefix cache, which layerwiseKv is in place of",
        ),
        (
            ["--set", "pools[0].name=a,pools[0].model=/models/m"],
            "pool a: the model is in /models, and modelVolume names no volume for it",
        ),
        (
            [
                "--set",
                "pools[0].name=a,pools[0].model=m,pools[1].name=a,pools[1].model=n",
            ],
            "pools: two have the name a",
        ),
    ],
)
def test_values_that_cannot_work_are_refused_in_one_sentence(
    arguments: list[str], sentence: str
) -> None:
    said = re.sub(r"\s+", " ", refusal(*arguments))

    where = r"execution error at \(evenflow/templates/checks.yaml:[\d:]+\)"
    hint = "Use --debug flag to render out invalid YAML"
    assert re.fullmatch(f"Error: {where}: {re.escape(sentence)} {hint} ", said)


def test_values_close_to_those_work() -> None:
    """Each sentence above has an edge; these are on its other side."""
    render("--set", "gateway.terminationGracePeriodSeconds=340")
    render("--set", "poolDefaults.drainSeconds=120,poolDefaults.terminationGracePeriodSeconds=150")
    pool = "pools[0].name=a,pools[0].model=m,pools[0].gpus=4,pools[0].tensorParallelSize=4"
    render("--set", pool)
    render("--set", "networkPolicy.enabled=false,redis.passwordSecret.name=redis")
    render("--set", "gateway.open=true,gateway.apiKeys.secretName=")
