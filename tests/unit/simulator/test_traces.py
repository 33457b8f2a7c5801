"""Recorded traces: small files in each format."""

import json
from dataclasses import asdict
from pathlib import Path

import pytest

from services.pacing.types import ServiceLevel
from services.placement.types import RequestId
from simulator.sessions import num_known_tokens
from simulator.traces import at_rate, mean_rate_per_s, read_jsonl, read_trace
from simulator.workload import ArrivingRequest

AZURE = """TIMESTAMP,ContextTokens,GeneratedTokens
2023-11-16 18:17:03.9799600,4808,10
2023-11-16 18:17:04.0319600,3180,8
2023-11-16 18:18:03.9799600,110,27
"""
AZURE_2024 = """TIMESTAMP,ContextTokens,GeneratedTokens
2024-05-10 00:00:00.009930+00:00,2162,5
2024-05-10 00:00:01.509930+00:00,2399,6
"""
BURSTGPT = """Timestamp,Model,Request tokens,Response tokens,Total tokens,Log Type
5,ChatGPT,472,18,490,Conversation log
45,ChatGPT,1087,0,1087,Conversation log
118.5,GPT-4,417,276,693,API log
"""
BURSTGPT_SESSIONS = (
    "Timestamp,Session ID,Elapsed time,Model,Request tokens,Response tokens,Total tokens,Log Type\n"
    "5,s1,2.5,ChatGPT,472,18,490,Conversation log\n"
)
MOONCAKE = """{"timestamp": 27482, "input_length": 6955, "output_length": 52, "hash_ids": [46, 47]}
{"timestamp": 30535, "input_length": 6472, "output_length": 26, "hash_ids": [46, 2353]}
"""
TRACELAB = """id,input_len,output_len,arrival_time,round_idx,tool_wait_after_ms,prefix_len
a,700,40,5000.0,0,1500.0,320
b,600,30,2000.0,0,0.0,320
a,100,50,5000.0,1,0.0,1060
a,80,20,5000.0,2,0.0,512
"""


def written(folder: Path, name: str, text: str) -> Path:
    (folder / name).write_text(text)
    return folder / name


def test_requests_of_a_published_trace_share_what_their_hashes_say(tmp_path) -> None:
    first, second = read_trace(written(tmp_path, "mooncake.jsonl", MOONCAKE), step_s=1.0)

    keys = [list(request.block_keys(16)) for request in (first, second)]
    assert keys[0][:32] == keys[1][:32]  # 512 tokens
    assert keys[0][32] != keys[1][32]


def test_a_trace_of_our_own_may_name_conversations(tmp_path) -> None:
    lines = "".join(
        json.dumps(row) + "\n"
        for row in (
            {"arrival_s": 0, "num_prompt_tokens": 30, "num_output_tokens": 10},
            {"arrival_s": 1, "num_prompt_tokens": 30, "num_output_tokens": 10, "conversation": "c"},
        )
    )
    alone, turn = read_jsonl(written(tmp_path, "own.jsonl", lines))

    assert list(alone.block_keys(16)) == []
    assert list(turn.block_keys(16)) == [("c", 0), ("c", 1)]


def shape(requests: list[ArrivingRequest]) -> list[tuple[float, int, int]]:
    return [(round(r.arrival_s, 6), r.num_prompt_tokens, r.num_output_tokens) for r in requests]


@pytest.mark.parametrize(
    ("name", "text", "expected"),
    [
        ("azure.csv", AZURE, [(0.0, 4808, 10), (0.052, 3180, 8), (60.0, 110, 27)]),
        ("azure24.csv", AZURE_2024, [(0.0, 2162, 5), (1.5, 2399, 6)]),
        # The second one failed: it has no answer.
        ("burst.csv", BURSTGPT, [(0.0, 472, 18), (113.5, 417, 276)]),
        ("sessions.csv", BURSTGPT_SESSIONS, [(0.0, 472, 18)]),
        ("mooncake.jsonl", MOONCAKE, [(0.0, 6955, 52), (3.053, 6472, 26)]),
    ],
)
def test_published_formats_are_told_apart_and_count_from_their_first_request(
    tmp_path, name, text, expected
) -> None:
    assert shape(read_trace(written(tmp_path, name, text), step_s=1.0)) == expected


def test_an_unknown_table_is_refused_with_its_columns(tmp_path) -> None:
    with pytest.raises(ValueError, match="colour"):
        read_trace(written(tmp_path, "t.csv", "time,colour\n1,red\n"), step_s=1.0)


@pytest.mark.parametrize(
    ("name", "text", "place"),
    [
        ("t.csv", AZURE + "yesterday,1,2\n", r"t\.csv:5"),
        ("t.csv", BURSTGPT + "7,GPT-4,many,2,3,API log\n", r"t\.csv:5"),
        ("t.jsonl", MOONCAKE + '{"timestamp": 1}\n', r"t\.jsonl:3"),
        ("t.json", '{"requests": {"a": {}}}', r"t\.json"),
    ],
)
def test_a_bad_row_is_named(tmp_path, name, text, place) -> None:
    with pytest.raises(ValueError, match=place):
        read_trace(written(tmp_path, name, text), step_s=1.0)


@pytest.mark.parametrize("name", ["empty.jsonl", "trace.txt"])
def test_what_is_no_trace_is_refused(tmp_path, name) -> None:
    with pytest.raises(ValueError, match=name):
        read_trace(written(tmp_path, name, ""), step_s=1.0)


def test_gaps_are_stretched_alike_to_a_rate(tmp_path) -> None:
    # Three requests over 60 s: 1/30 per s; at twice the rate every gap is half as long.
    requests = read_trace(written(tmp_path, "azure.csv", AZURE), step_s=1.0)
    faster = at_rate(requests, 1 / 15)

    assert mean_rate_per_s(requests) == pytest.approx(1 / 30)
    assert [r.arrival_s for r in faster] == pytest.approx([0.0, 0.026, 30.0])


def test_requests_that_come_at_once_have_no_rate(tmp_path) -> None:
    at_once = read_trace(written(tmp_path, "m.jsonl", MOONCAKE.replace("30535", "27482")), step_s=1)

    assert mean_rate_per_s(at_once) == float("inf")
    assert at_rate(at_once, 5.0) == at_once


def test_our_own_format_goes_out_and_in(tmp_path) -> None:
    requests = [
        ArrivingRequest(
            request_id=RequestId("x"),
            arrival_s=1.5,
            num_prompt_tokens=10,
            num_output_tokens=4,
            level=ServiceLevel(slo_tbt_s=0.1, pace_tail=True),
            priority=2,
        ),
        ArrivingRequest(
            request_id=RequestId("y"), arrival_s=2.0, num_prompt_tokens=1, num_output_tokens=1
        ),
        ArrivingRequest(
            request_id=RequestId("z"),
            arrival_s=3.0,
            num_prompt_tokens=600,
            num_output_tokens=1,
            conversation="c",
            prompt_hashes=(7, 8),
            leaves_after=1,
        ),
    ]
    rows = [asdict(request) for request in requests]
    levels = [{name: v for name, v in row.pop("level").items() if v} for row in rows]
    lines = [json.dumps(row | level) for row, level in zip(rows, levels, strict=True)]
    (tmp_path / "trace.jsonl").write_text("\n".join(lines))

    assert read_jsonl(tmp_path / "trace.jsonl") == requests


@pytest.mark.parametrize(
    "line",
    [
        "no json",
        '{"arrival_s": 0, "num_prompt_tokens": 3}',
        '{"arrival_s": 0, "num_prompt_tokens": 0, "num_output_tokens": 1}',
        '{"arrival_s": 0, "num_prompt_tokens": 3, "num_output_tokens": 1, "leaves_after": 0}',
        '{"arrival_s": 0, "num_prompt_tokens": 3, "num_output_tokens": 1, "colour": "red"}',
    ],
)
def test_a_bad_line_is_named(tmp_path, line) -> None:
    good = '{"arrival_s": 0, "num_prompt_tokens": 3, "num_output_tokens": 1}\n'
    (tmp_path / "trace.jsonl").write_text(good + line)

    with pytest.raises(ValueError, match=r"trace\.jsonl:2"):
        read_jsonl(tmp_path / "trace.jsonl")


def test_orbitflows_arrivals_count_steps(tmp_path) -> None:
    rows = {
        "request_0": {"input_length": 20, "output_length": 5, "arrival_time": 61},
        "request_1": {"input_length": 30, "output_length": 6, "arrival_time": 0},
    }
    (tmp_path / "t.json").write_text(json.dumps({"requests": rows}))

    first, second = read_trace(tmp_path / "t.json", step_s=0.5)

    assert (first.request_id, first.arrival_s, first.num_output_tokens) == ("request_1", 0.0, 6)
    assert (second.request_id, second.arrival_s) == ("request_0", 30.5)


def test_rounds_of_agents_are_sessions(tmp_path) -> None:
    requests = read_trace(written(tmp_path, "coding_trace.csv", TRACELAB), step_s=1.0)

    assert [(one.request_id, one.arrival_s, one.num_prompt_tokens) for one in requests] == [
        ("b.0", 0.0, 920),
        ("a.0", 3.0, 1_020),
        ("a.1", 3.0, 1_160),
        ("a.2", 3.0, 592),
    ]
    second, third = requests[2:]
    assert [one.follows for one in requests] == [(), (), ("a.0",), ("a.1",)]
    assert (second.wait_s, third.wait_s) == (1.5, 0.0)
    keys = {one.request_id: list(one.block_keys(16)) for one in requests}
    assert keys["a.0"][:20] == keys["b.0"][:20]  # what all begin with
    assert keys["a.0"][20] != keys["b.0"][20]
    assert keys["a.1"][: 1_060 // 16] == keys["a.0"]  # prompt and answer
    assert keys["a.2"][:32] == keys["a.1"][:32]  # of its session it has 512 tokens left
    assert keys["a.2"][32] != keys["a.1"][32]
    assert mean_rate_per_s(requests) == 1 / 3  # sessions
    assert [one.arrival_s for one in at_rate(requests, 1.0)] == [0.0, 1.0, 1.0, 1.0]


@pytest.mark.parametrize(
    "row", ["a,0,40,0,0,0,320", "a,700,0,0,0,0,320", "a,700,40,0,0,0,-1", "a,700,40,0,0,x,1"]
)
def test_a_round_that_cannot_be_is_named(tmp_path, row) -> None:
    text = "\n".join([TRACELAB.splitlines()[0], row, ""])

    with pytest.raises(ValueError, match=r"coding_trace\.csv:2: "):
        read_trace(written(tmp_path, "coding_trace.csv", text), step_s=1.0)


def call(begin_s: float, took_s: float, num_prompt: int, hash_ids: list[int], **more) -> dict:
    times = {"t": begin_s, "api_time": took_s}
    return {"type": "n", "in": num_prompt, "out": 8, "hash_ids": hash_ids, **times, **more}


def inferencex(*entries: dict) -> str:
    scope = {"block_size": 64, "hash_id_scope": "local"}
    return json.dumps({"id": "of no interest", **scope, "requests": entries}) + "\n"


def test_sessions_of_agents_wait_for_what_had_ended_when_they_were_recorded(tmp_path) -> None:
    helper = {
        "type": "subagent",
        "t": 4.0,
        "requests": [call(4.0, 1.0, 64, [9]), call(6.0, 1.0, 128, [9, 8])],
    }
    beside = {"type": "subagent", "t": 4.5, "requests": [call(4.5, 9.0, 64, [7])]}
    trace = inferencex(
        call(0.0, 2.0, 130, [0, 1, 2]),
        call(0.5, 0.5, 64, [5]),  # in parallel, as a title is
        call(2.5, 1.0, 192, [0, 1, 3]),
        helper,
        beside,
        call(8.0, 1.0, 256, [0, 1, 3, 4]),
        call(20.0, 1.0, 64, [0], out=0),  # failed
    )
    requests = read_trace(written(tmp_path, "t.jsonl", trace + trace), step_s=1.0)

    first = [one for one in requests if one.request_id.startswith("s1.")]
    follows = {one.request_id: (one.follows, one.wait_s) for one in first}
    assert follows == {
        "s1.0": ((), 0.0),
        "s1.1": ((), 0.0),
        "s1.2": (("s1.0",), 0.5),
        "s1.a3.0": (("s1.2",), 0.5),
        "s1.a3.1": (("s1.a3.0",), 1.0),
        "s1.a4.0": (("s1.2",), 1.0),
        "s1.5": (("s1.2", "s1.a3.1"), 1.0),  # the other sub-agent works on
    }
    assert [one.arrival_s for one in first] == [0.0] * 6 + [0.5]
    known = num_known_tokens(requests, 64)
    assert (known["s1.0"], known["s1.2"], known["s1.5"]) == (0, 128, 192)
    assert known["s1.a3.1"] == 64
    assert known["s2.0"] == 0  # its ids are another session's
    assert [len(list(one.block_keys(16))) for one in first[:1]] == [130 // 16]


def test_calls_at_one_instant_do_not_wait_for_each_other(tmp_path) -> None:
    trace = inferencex(call(1.0, 0.0, 64, [0]), call(1.0, 0.0, 64, [0]), call(2.0, 0.0, 64, [0]))
    requests = read_trace(written(tmp_path, "t.jsonl", trace), step_s=1.0)

    assert [one.follows for one in requests] == [(), ("s1.0",), ("s1.1",)]


@pytest.mark.parametrize("entry", [{"type": "n"}, call(0.0, 1.0, 64, None), 7])
def test_a_session_that_cannot_be_is_named(tmp_path, entry) -> None:
    with pytest.raises(ValueError, match=r"t\.jsonl:2: "):
        read_trace(written(tmp_path, "t.jsonl", inferencex() + inferencex(entry)), step_s=1.0)


def test_a_trace_of_our_own_may_have_sessions(tmp_path) -> None:
    rows = [
        {"request_id": "a", "arrival_s": 9, "num_prompt_tokens": 64, "num_output_tokens": 32},
        {
            "request_id": "b",
            "arrival_s": 0,
            "num_prompt_tokens": 128,
            "num_output_tokens": 16,
            "follows": ["a"],
            "wait_s": 2.5,
            "conversation": "b",
            "branches_off": [["a", 96]],
        },
        {"request_id": "c", "arrival_s": 1, "num_prompt_tokens": 64, "num_output_tokens": 32},
    ]
    rows[0]["conversation"] = "a"
    lines = "".join(json.dumps(row) + "\n" for row in rows)
    requests = read_jsonl(written(tmp_path, "own.jsonl", lines))

    assert [one.request_id for one in requests] == ["c", "a", "b"]
    assert (requests[2].follows, requests[2].wait_s) == (("a",), 2.5)
    assert list(requests[2].block_keys(16))[:6] == list(requests[1].block_keys(16))

    backwards = written(tmp_path, "own.jsonl", "".join(reversed(lines.splitlines(keepends=True))))
    with pytest.raises(ValueError, match=r"own\.jsonl:2: .*'a'"):
        read_jsonl(backwards)
