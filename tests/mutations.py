"""Do the tests notice? Breaks one mechanism at a time and expects tests of `make test` to fail.

`python -m tests.mutations [NAME ...]` works on a copy of the tree, and ends with status 1 if a
mechanism could be broken unnoticed.
"""

import os
import shutil
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
COPY = ROOT / ".cache" / "mutated"
TIMEOUT_S = 3_600.0  # a guard against hangs
EXECUTOR = "services/executor"
CONTROL = "services/control"
ONE_ENGINE = ("tests/exact/test_layerwise_exact.py", "-k", "layers and not layers-async")
UNCACHED = ("tests/unit/executor/blocks/test_uncached.py",)
TRUNKS = ("tests/unit/executor/blocks/sharing/test_trunks.py",)
IN_POOL_ONLY = ("tests/unit/executor/blocks/sharing/test_in_pool_only.py",)
PLANNED_TRUNKS = ("tests/unit/planner/policy/test_prefixes.py",)
SIDES = ("tests/unit/executor/blocks/test_side_groups.py",)
SIDE_COPIES = ("tests/unit/executor/blocks/test_side_copies.py",)
ONE_KIND = ("tests/exact/test_kinds.py", "-m", "not nightly", "-k", "gpt_oss and not asynchronous")
STATES = ("tests/exact/test_kinds.py", "-m", "not nightly", "-k", "zeroed")
GOES_ON = ("tests/exact/test_resume.py", "-m", "not nightly", "-k", "in_its_cache")
REPLAY = ("tests/integration/test_executor_replay.py",)
SENT_AGAIN = ("tests/integration/test_gateway_sent_again.py",)
SERVING = ("tests/unit/executor/serving",)
DRAFTS = ("tests/exact/test_drafts.py", "-k", "three")
DRAFTS_OF_A_HEAD = ("tests/exact/test_drafts_with_kv.py", "-k", "asynchronous")
COMING_BACK = ("tests/integration/test_gateway_coming_back.py",)
SHADOWS = ("tests/unit/executor/scheduler/test_shadows.py",)


@dataclass(frozen=True)
class Mutation:
    """One line of one file, broken."""

    name: str
    file: str
    right: str
    wrong: str
    tests: tuple[str, ...]  # arguments of pytest


MUTATIONS = (
    Mutation(
        "the form of `evenflow size` reads paths of the asker's",
        "simulator/form.py",
        'options.get("model") not in known',
        "False",
        ("tests/unit/simulator/test_form.py",),
    ),
    Mutation(
        "the form of `evenflow size` imports modules of the asker's",
        "simulator/form.py",
        'options.get("policy", "evenflow") not in PRESETS',
        "False",
        ("tests/unit/simulator/test_form.py",),
    ),
    Mutation(
        "a new pace leaves what waits as it was",
        "services/gateway/live/pacer.py",
        "turn_s = self._turn_s if read_s is None else read_s - self._interval_s",
        "turn_s = self._turn_s",
        ("tests/unit/gateway/live/test_pacer.py",),
    ),
    Mutation(
        "a new pace makes the scheduler read again",
        "services/pacing/deposit.py",
        "start = max(first, bisect_right(self._due_s, now_s))",
        "start = first",
        ("tests/unit/pacing/test_deposit.py",),
    ),
    Mutation(
        "the scheduler does not hear of a new pace",
        "services/gateway/live/repacing.py",
        "live.route.link.pace(live.route.ref.request_id, level)",
        "pass",
        ("tests/integration/test_gateway_repacing.py",),
    ),
    Mutation(
        "a client comes back to what its prompt was told behind",
        "services/gateway/http/resuming.py",
        "return self._numbered(said + writer.tokens([step]), of_token=index)",
        "return self._numbered(writer.tokens([step]) + said, of_token=index)",
        COMING_BACK,
    ),
    Mutation(
        "events of one token have one id",
        "services/gateway/http/resuming.py",
        "self._num_since += 1",
        "self._num_since = 1",
        COMING_BACK,
    ),
    Mutation(
        "what was due while nobody read is lost",
        "services/gateway/resumable/stream.py",
        "reader.take(indexes[num_had], steps[num_had])",
        "pass",
        COMING_BACK,
    ),
    Mutation(
        "streams that are read are let go of before those that are not",
        "services/gateway/resumable/streams.py",
        "return not stream.is_detached, stream.left_s",
        "return stream.is_detached, stream.left_s",
        COMING_BACK,
    ),
    Mutation(
        "a reader who comes back has stopped reading already",
        "services/gateway/live/generation.py",
        "self._reader.took(0)  # and one that has left is not waited for",
        "pass",
        COMING_BACK,
    ),
    Mutation(
        "anybody's stream may be given another pace",
        "services/gateway/live/dispatcher.py",
        "if named := [live for live in named if live.generation.caller == caller]:",
        "if named:",
        ("tests/integration/test_gateway_repacing.py",),
    ),
    Mutation(
        "seal without copy",
        f"{EXECUTOR}/copies/device/lane.py",
        "self.issue(Chunk(job, 0, len(job.slots)), source_is_stable=False)",
        "pass",
        ONE_ENGINE,
    ),
    Mutation(
        "seal one block early",
        f"{EXECUTOR}/blocks/seals.py",
        "num_complete = min(group.num_host_blocks for group in groups)",
        "num_complete = 1 + min(group.num_host_blocks for group in groups)",
        ONE_ENGINE,
    ),
    Mutation(
        "wrong staging buffer",
        f"{EXECUTOR}/blocks/staging.py",
        "self._point_at(kv, index, ordinal % len(kv.staging))",
        "self._point_at(kv, index, 0)",
        ONE_ENGINE,
    ),
    Mutation(
        "a latent's metadata has another group's blocks",
        f"{EXECUTOR}/plugin/latent_memo.py",
        "updated.decode.block_table = block_table[:num_decodes]",
        "pass",
        ("tests/exact/test_latent.py",),
    ),
    Mutation(
        "a latent's metadata is an earlier step's",
        f"{EXECUTOR}/plugin/step_memo.py",
        "return common.query_start_loc, common.seq_lens, common.causal",
        "return (common.causal,)",
        ("tests/unit/executor/plugin/test_latent_memo.py",),
    ),
    Mutation(
        "begun behind KV by a backend that computes prompts whole",
        f"{EXECUTOR}/scheduler/scheduler.py",
        "self._computes_prompts_whole = computes_prompts_whole(config)",
        "self._computes_prompts_whole = False",
        ("tests/exact/test_latent.py",),
    ),
    Mutation(
        "a window that no request outgrows is one",
        "services/placement/layer_kinds.py",
        "max_model_len <= layer.window",
        "max_model_len < layer.window",
        ("tests/unit/executor/test_model_kinds.py",),
    ),
    Mutation(
        "dropped while it is copied",
        f"{EXECUTOR}/blocks/uncached.py",
        "num_most = min(num_most, kv.num_host_blocks)",
        "pass",
        UNCACHED,
    ),
    Mutation(
        "loaded over scratch",
        f"{EXECUTOR}/blocks/uncached.py",
        "self._staging.load_anew(kv, index)",
        "pass",
        UNCACHED,
    ),
    Mutation(
        "kept again and not computed",
        f"{EXECUTOR}/blocks/residency.py",
        "return len(self.uncached) + len(self.retiring)",
        "return len(self.uncached)",
        UNCACHED,
    ),
    Mutation(
        "what each step computes anew is found",
        f"{EXECUTOR}/blocks/block_owner.py",
        "first = max(kv.num_recomputed, kv.first)",
        "first = 0",
        ("tests/unit/executor/blocks/test_prefix_hits.py",),
    ),
    Mutation(
        "shadows never end",
        f"{EXECUTOR}/scheduler/shadows.py",
        "output.finished_req_ids.update(self._last)",
        "pass",
        SHADOWS,
    ),
    Mutation(
        "a shadow says its next token",
        f"{EXECUTOR}/scheduler/shadows.py",
        "[: self._num_tokens(kv)], NOT_COMPUTED]",
        "[: self._num_tokens(kv)]]",
        SHADOWS,
    ),
    Mutation(
        "computed from the wrong tokens",
        f"{EXECUTOR}/scheduler/shadows.py",
        "*request.all_token_ids[: self._num_tokens(kv)], NOT",
        "*request.all_token_ids[1 : 1 + self._num_tokens(kv)], NOT",
        SHADOWS,
    ),
    Mutation(
        "scratch given back before it is read",
        f"{EXECUTOR}/scheduler/shadows.py",
        "for kv in self._last.values():",
        "for kv in list(self._uncached.kvs):",
        SHADOWS,
    ),
    Mutation(
        "a shadow of a request that the step leaves out",
        f"{EXECUTOR}/scheduler/shadows.py",
        "if kv.request_id in output.num_scheduled_tokens:",
        "if True:",
        SHADOWS,
    ),
    Mutation(
        "prefixes take the room of other requests' tokens",
        f"{EXECUTOR}/scheduler/shadows.py",
        "num_left = (self._most - self._scheduler.max_num_active_reqs) //",
        "num_left = self._most //",
        SHADOWS,
    ),
    Mutation(
        "a step holds more tokens than it may",
        f"{EXECUTOR}/scheduler/shadows.py",
        "self._scheduler.max_num_scheduled_tokens = self._most - num_tokens",
        "pass",
        SHADOWS,
    ),
    Mutation(
        "dropped while it is paused",
        f"{EXECUTOR}/scheduler/shadows.py",
        " or record.is_held or record.state.is_skipped or ",
        " or ",
        SHADOWS,
    ),
    Mutation(
        "dropped whose tokens do not say all",
        f"{EXECUTOR}/scheduler/shadows.py",
        "decodes and not request.mm_features and",
        "decodes and",
        SHADOWS,
    ),
    Mutation(
        "what is computed anew is measured as decodes",
        f"{EXECUTOR}/scheduler/ellm.py",
        "self.loop.meter.recomputes(self.shadows.add_to(output))",
        "self.shadows.add_to(output)",
        SHADOWS,
    ),
    Mutation(
        "nothing is uncached",
        f"{EXECUTOR}/scheduler/ellm.py",
        "self.shadows.uncache(self._wanted())",
        "self.shadows.uncache({})",
        SHADOWS,
    ),
    Mutation(
        "a step that computes anew is held against decodes",
        f"{CONTROL}/step_meter.py",
        "        self._in_flight.append((step, None))\n",
        "        self._in_flight.append((step, _))\n",
        ("tests/unit/control/test_step_meter.py",),
    ),
    Mutation(
        "lost wait for a load",
        f"{EXECUTOR}/copies/transfer_runner.py",
        "            self._await(load.request_ids, load.copy)\n",
        "            pass\n",
        ONE_ENGINE,
    ),
    Mutation(
        "lost wait for a save out of staging",
        f"{EXECUTOR}/copies/transfer_runner.py",
        "                self._await([request_id], copy)\n",
        "                pass\n",
        ONE_ENGINE,
    ),
    Mutation(
        "load into a buffer in use",
        f"{EXECUTOR}/copies/load_tables.py",
        "position = self.chain.index(group) + self.num_staging\n",
        "position = self.chain.index(group) + self.num_staging + 1\n",
        ONE_ENGINE,
    ),
    Mutation(
        "tokens of lost KV leave",
        f"{EXECUTOR}/blocks/transfers/losses.py",
        "        return lost | self._distrust(lost)\n",
        "        return {}\n",
        ("tests/exact/test_layerwise_failures.py",),
    ),
    Mutation(
        "blocks of a hung copy are given to others",
        f"{EXECUTOR}/blocks/quarantine.py",
        "self._pool.touch([self._blocks[block_id] for block_id in new_blocks])",
        "pass",
        ("tests/exact/test_layerwise_failures.py", "tests/unit/executor"),
    ),
    Mutation(
        "columns are found before every rank has them",
        f"{EXECUTOR}/blocks/sharing/publishing.py",
        "num_copied = min(holder.num_copied_blocks, len(holder.columns))",
        "num_copied = min(min(g.num_saves_sent for g in holder.groups), len(holder.columns))",
        ("tests/unit/executor/blocks/test_prefix_hits.py",),
    ),
    Mutation(
        "columns in use are evicted",
        f"{CONTROL}/prefix_cache.py",
        "            if column.num_users:\n                continue\n",
        "",
        ("tests/unit/executor/blocks/test_prefix_cache.py",),
    ),
    Mutation(
        "a request that waits goes on finding what was evicted",
        f"{CONTROL}/prefix_cache.py",
        " or found.generation < self._last_loss\n",
        "\n",
        ("tests/unit/executor/blocks/test_prefix_cache.py",),
    ),
    Mutation(
        "who shares a corrupt column runs on",
        f"{EXECUTOR}/blocks/transfers/losses.py",
        "        return lost | self._distrust(lost)\n",
        "        return lost\n",
        ("tests/unit/executor/blocks/test_prefix_hits.py",),
    ),
    Mutation(
        "edits of a trunk miss a user",
        f"{EXECUTOR}/blocks/sharing/trunks.py",
        "self._orders.use(trunk.name, [user.request_id for user in trunk.users])",
        "self._orders.use(trunk.name, [u.request_id for u in list(trunk.users)[:-1]])",
        TRUNKS,
    ),
    Mutation(
        "a trunk ends with its first user",
        f"{EXECUTOR}/blocks/sharing/trunks.py",
        "            if trunk.users:\n",
        "            if False:\n",
        TRUNKS,
    ),
    Mutation(
        "what was cut off stays a holder's own",
        f"{EXECUTOR}/blocks/sharing/splits.py",
        "        group.first = end\n",
        "",
        TRUNKS,
    ),
    Mutation(
        "half of a copy under way is a trunk's",
        f"{EXECUTOR}/blocks/sharing/splits.py",
        "coming = holder.restoring if end < holder.num_rows else []",
        "coming = list[int]()",
        TRUNKS,
    ),
    Mutation(
        "what is not on the host yet leaves the pool",
        f"{EXECUTOR}/blocks/sharing/splits.py",
        "mirrored=is_on_host",
        "mirrored=True",
        TRUNKS,
    ),
    Mutation(
        "copies of who has ended are given up, whoever waits for them",
        "services/executor/copies/transfer_runner.py",
        " or self._tables.holders(order.uids[0])",
        "",
        TRUNKS,
    ),
    Mutation(
        "who shares what a lost request computed goes on",
        f"{EXECUTOR}/blocks/transfers/losses.py",
        "authors = () if trunk.mirrored else {one.author for one in own_columns(trunk)}",
        "authors = ()",
        TRUNKS,
    ),
    Mutation(
        "what a lost request left in the pool only is found",
        f"{EXECUTOR}/blocks/transfers/losses.py",
        "self._owner.host.forget(lambda column: column.is_left and not column.is_complete)",
        "pass",
        IN_POOL_ONLY,
    ),
    Mutation(
        "the last user of what was lost leaves it to others",
        f"{EXECUTOR}/blocks/sharing/trunks.py",
        "end = trunk.end if is_right else trunk.num_copied_blocks",
        "end = trunk.end",
        IN_POOL_ONLY,
    ),
    Mutation(
        "what has no room on the host is copied somewhere",
        f"{EXECUTOR}/blocks/transfers/write_through.py",
        "if trunk.mirrored or not trunk.is_copied:",
        "if trunk.mirrored:",
        IN_POOL_ONLY,
    ),
    Mutation(
        "a column is in the pool when others have had its blocks",
        f"{EXECUTOR}/blocks/pool_blocks.py",
        "            column.is_left = False\n            self._on_lost(column)\n",
        "            pass\n",
        IN_POOL_ONLY,
    ),
    Mutation(
        "a column that lacks a layer group is in the pool",
        f"{EXECUTOR}/blocks/pool_blocks.py",
        "                if len(left) == len(blocks):\n",
        "                if left:\n",
        ("tests/unit/executor/blocks/test_pool_blocks.py", *IN_POOL_ONLY),
    ),
    Mutation(
        "one that is refused room on the host computes what others have",
        "services/control/room/resumes.py",
        "if way is not ResumeWay.RECOMPUTE and self._moves.stay(kv, num_left):",
        "if False:",
        IN_POOL_ONLY,
    ),
    Mutation(
        "one that waits takes what those need that run",
        "services/control/room/resumes.py",
        "if self._moves.num_to_fit(kv) > num_left:",
        "if False:",
        ("tests/unit/executor/scheduler/test_sharing_without_host.py",),
    ),
    Mutation(
        "plans may offload what has no room on the host",
        f"{EXECUTOR}/blocks/holder.py",
        " if self.is_copied else ()",
        "",
        IN_POOL_ONLY,
    ),
    Mutation(
        "a parked request does not know what others saved of it",
        f"{EXECUTOR}/blocks/block_owner.py",
        "if others_saved:",
        "if False:",
        TRUNKS,
    ),
    Mutation(
        "a parked request keeps what is not on the host",
        f"{EXECUTOR}/blocks/residency.py",
        "if not trunk.mirrored:",
        "if False:",
        TRUNKS,
    ),
    Mutation(
        "newcomers compute what another one computes",
        "services/control/order/line.py",
        "if record.is_held or self._is_coming(request):",
        "if record.is_held:",
        ("tests/unit/executor/scheduler/test_run_control.py",),
    ),
    Mutation(
        "a batch beyond the pool is judged by one victim alone",
        "services/placement/run/evenflow.py",
        "(_without(self.batch, victim), self._fitting(self.batch))",
        "(_without(self.batch, victim),)",
        ("tests/unit/placement/run/test_shared_prefixes.py",),
    ),
    Mutation(
        "a trunk that its first user does not load",
        f"{EXECUTOR}/blocks/transfers/transfers.py",
        "for one in (*kv.trunks, kv) if one.staging",
        "for one in (kv,) if one.staging",
        TRUNKS,
    ),
    Mutation(
        "where a plan has a trunk is overlooked while all fits",
        f"{CONTROL}/room/capacity_guard.py",
        "            if trunk.floor is not None:\n",
        "            if False:\n",
        TRUNKS,
    ),
    Mutation(
        "the guard keeps trunks in the pool, whatever a plan says",
        f"{CONTROL}/room/capacity_guard.py",
        "floor = trunk.floor or ALL_RESIDENT",
        "floor = ALL_RESIDENT",
        TRUNKS,
    ),
    Mutation(
        "in a planned window what is shared grows",
        "services/planner/policy/window.py",
        "after = growth.num_tokens[r] + int(np.ceil((step + 1) * growth.per_step[r]))",
        "after = growth.num_tokens[r] + step + 1",
        PLANNED_TRUNKS,
    ),
    Mutation(
        "what is shared is read for nobody",
        "services/placement/step_time/prefill.py",
        "self.tokens_read_at(step) + self.num_shared",
        "self.tokens_read_at(step)",
        PLANNED_TRUNKS,
    ),
    Mutation(
        "plans are judged without what is shared",
        "services/placement/judging/plan_rules.py",
        "used.update(request.prefix_ids)",
        "pass",
        ("tests/unit/placement/judging/test_plan_rules.py",),
    ),
    Mutation(
        "who joins a trunk that is lost runs on",
        f"{EXECUTOR}/blocks/transfers/losses.py",
        "        lost |= self._lost_with_trunks(feedback.lost_requests)\n",
        "",
        TRUNKS,
    ),
    Mutation(
        "who was parked is not asked for what went wrong before",
        f"{EXECUTOR}/blocks/transfers/transfers.py",
        "            if kv.first_step == 0:\n",
        "            if True:\n",
        TRUNKS,
    ),
    Mutation(
        "what a batch shares is counted for each",
        "services/placement/run/types.py",
        "return num_blocks - sum((n - 1)",
        "return num_blocks - 0 * sum((n - 1)",
        ("tests/unit/placement/run/test_shared_prefixes.py",),
    ),
    Mutation(
        "who frees nothing is parked",
        "services/placement/run/evenflow.py",
        "if victim.prefixes and free and not self._frees(rest, victim):",
        "if False:",
        ("tests/unit/placement/run/test_shared_prefixes.py",),
    ),
    Mutation(
        "one that shares little with what is larger than the pool runs with it",
        "services/placement/run/larger_than_pool.py",
        "        if len(batch) * more_s < len(more) * before_s:\n",
        "        if True:\n",
        ("tests/unit/placement/run/test_shared_prefixes.py",),
    ),
    Mutation(
        "a request that leaves is called back without the layers that it gave up",
        "services/control/order/run_order.py",
        "            if decision.offloads or is_whole(record.kv):\n",
        "            if True:\n",
        ("tests/unit/executor/scheduler/test_admitting.py",),
    ),
    Mutation(
        "what a request that leaves has not copied keeps layers of others on the host",
        "services/control/room/capacity_guard.py",
        "but=leaving | {need.record for need in needs}",
        "but={need.record for need in needs}",
        ("tests/unit/simulator/engine/test_guard.py",),
    ),
    Mutation(
        "a simulated request leaves while its token is in flight",
        "simulator/engine/scheduler.py",
        "            if is_leaving and request not in self.in_flight:\n",
        "            if is_leaving:\n",
        ("tests/unit/simulator/engine/test_parks.py",),
    ),
    Mutation(
        "a request that only shares does not look again",
        "services/control/order/line.py",
        "            self.resumes.begin_anew(record)\n",
        "            return\n",
        ("tests/unit/simulator/engine/test_trunks.py",),
    ),
    Mutation(
        "simulated users of a trunk load it each",
        "simulator/engine/turns.py",
        "    trunks = dict.fromkeys(trunk for turn in turns for trunk in turn.request.kv.trunks)\n",
        "    trunks = [trunk for turn in turns for trunk in turn.request.kv.trunks]\n",
        ("tests/unit/simulator/engine/test_trunks.py",),
    ),
    Mutation(
        "the copy of a trunk's last block ends with the request that it was cut from",
        "simulator/memory/trunks.py",
        "        job.num_users += first < end < upto\n",
        "",
        ("tests/unit/simulator/engine/test_trunks.py",),
    ),
    Mutation(
        "a plan for more than the pool",
        "services/placement/judging/plan_rules.py",
        "> now.engine.num_blocks:",
        "> 2 * now.engine.num_blocks:",
        ("tests/unit/placement", "tests/exact/test_closed_loop.py"),
    ),
    Mutation(
        "who is not named by a decision comes in",
        f"{EXECUTOR}/scheduler/run_control.py",
        "        for request in line:\n            queue.add_request(request)\n",
        "        for request in all_waiting:\n            queue.add_request(request)\n",
        ("tests/unit/executor/scheduler/test_admitting.py",),
    ),
    Mutation(
        "blocks that a stopped reader's request keeps are given away",
        f"{EXECUTOR}/scheduler/plain/whole_engine.py",
        "        return bool(self._records[request.request_id].holds)\n",
        "        return False\n",
        ("tests/integration/test_whole_policy.py",),
    ),
    Mutation(
        "what ended requests had in common is remembered",
        f"{EXECUTOR}/scheduler/plain/common_prefixes.py",
        "                del self._blocks[one]\n",
        "                pass\n",
        ("tests/unit/executor/scheduler/test_common_prefixes.py",),
    ),
    Mutation(
        "agents leave people no room",
        "services/placement/run/evenflow.py",
        "return self._promise.holds([*members, request, *people])",
        "return self._promise.holds([*members, request])",
        ("tests/unit/placement/run/test_evenflow.py",),
    ),
    Mutation(
        "a reader is promised a step for each token, whatever drafts bring",
        "services/placement/run/types.py",
        "return self.rate_tps / self.tokens_per_step",
        "return self.rate_tps",
        ("tests/unit/placement/run/test_evenflow.py",),
    ),
    Mutation(
        "a plan's contexts grow by a token a step, whatever drafts bring",
        "services/placement/types.py",
        "return math.ceil(num_steps * self.tokens_per_step)",
        "return num_steps",
        ("tests/unit/planner/policy/test_orbitflow.py",),
    ),
    Mutation(
        "more readers are promised than the host keeps",
        "services/placement/run/promise.py",
        "return None if self.keeps(members) else Limit.HOST",
        "return None",
        ("tests/unit/placement/run/test_taking_turns.py",),
    ),
    Mutation(
        "a machine is sized as if the host kept all readers",
        "services/placement/run/reader_capacity.py",
        "max(self.num_held, min(self.num_sustained, self.num_kept))",
        "max(self.num_held, self.num_sustained)",
        ("tests/unit/placement/run/test_reader_capacity.py",),
    ),
    Mutation(
        "windows take no room of readers'",
        "services/placement/run/reader_capacity.py",
        "num_blocks += side_blocks(",
        "_ = side_blocks(",
        ("tests/unit/placement/run/test_reader_capacity.py",),
    ),
    Mutation(
        "a simulated request that gives way has its windows on the host",
        "simulator/memory/kv.py",
        "        if not (self.num_side_tokens or self.is_saved):\n",
        "        if False:\n",
        ("tests/unit/simulator/engine/test_sides.py",),
    ),
    Mutation(
        "a simulated request leaves before its windows",
        "simulator/memory/side_copies.py",
        "    return kv.is_saved\n",
        "    return True\n",
        ("tests/unit/simulator/engine/test_sides.py", "-k", "parked"),
    ),
    Mutation(
        "side groups take no blocks of vLLM's simulated pool",
        "simulator/memory/shared_pool.py",
        "        if num_more + num_to_lend > len(self._free):\n",
        "        if num_more > len(self._free):\n",
        ("tests/unit/simulator/memory/test_shared_pool.py",),
    ),
    Mutation(
        "readers make room for any number of prompts at a time",
        "services/placement/run/evenflow.py",
        "if len(prompts) > rules.most_prompts:",
        "if False:",
        ("tests/unit/placement/run/test_evenflow.py",),
    ),
    Mutation(
        "readers make room whether or not the link can bring all back",
        "services/placement/run/evenflow.py",
        "return max(least_s, self._promise.turn_s)",
        "return least_s",
        ("tests/unit/placement/run/test_evenflow.py",),
    ),
    Mutation(
        "prompts come in short pieces beside readers who lack nothing",
        "services/placement/run/prompts.py",
        "    if is_waited_for:\n",
        "    if True:\n",
        ("tests/unit/placement/run/test_evenflow.py",),
    ),
    Mutation(
        "a reader makes room with nothing in hand",
        "services/placement/run/evenflow.py",
        "stays = victim.spare_s < floor_s(victim)",
        "stays = False",
        ("tests/unit/placement/run",),
    ),
    Mutation(
        "frame gap ignored",
        "services/gateway/executors/inflight.py",
        "if output.first_token_index > request.num_tokens:",
        "if False:",
        ("tests/unit/gateway", "tests/integration/test_gateway_link.py"),
    ),
    Mutation(
        "repeated tokens delivered twice",
        "services/gateway/executors/inflight.py",
        "num_duplicates = min(num_known - output.first_token_index, len(tokens))",
        "num_duplicates = 0",
        ("tests/unit/gateway", "tests/integration/test_gateway_link.py"),
    ),
    Mutation(
        "a write that fails ends the reading of what has come",
        "services/gateway/executors/link.py",
        "except (aio.AioRpcError, aio.BaseError, asyncio.InvalidStateError):",
        "except (aio.BaseError, asyncio.InvalidStateError):",
        ("tests/unit/gateway/executors/test_link.py",),
    ),
    Mutation(
        "answers move to executors that are not alike",
        "services/gateway/live/failover/rules.py",
        "candidate.fingerprints.get(answer.model) != home.fingerprints[answer.model]:",
        "False:",
        ("tests/unit/gateway/live/test_failover.py",),
    ),
    Mutation(
        "answers move to executors without room for them",
        "services/gateway/live/failover/rules.py",
        "return answer.num_prompt_tokens + answer.max_tokens <= candidate.max_model_len",
        "return True",
        ("tests/unit/gateway/live/test_failover.py",),
    ),
    Mutation(
        "no request is what executors are lost to",
        "services/gateway/live/failover/moves.py",
        "            live.losses.add(count, may_live(error, live.home or live.asked))\n",
        "            pass\n",
        ("tests/integration/test_gateway_moves.py",),
    ),
    Mutation(
        "suspects are tried together",
        "services/gateway/live/failover/moves.py",
        "tries={*self._tried_at(live, now_s)} if live.losses.total >= IS_SUSPECT else (),",
        "tries=(),",
        ("tests/integration/test_gateway_moves.py",),
    ),
    Mutation(
        "what a link that was cut counts against a request is never taken back",
        "services/gateway/live/failover/moves.py",
        "                live.losses.found_alive(life)\n",
        "                pass\n",
        ("tests/integration/test_gateway_moves.py", "-k", "says_nothing"),
    ),
    Mutation(
        "what waits in a queue until executors are lost is never found",
        "services/gateway/live/failover/rules.py",
        "return 1.0 if self.since_taken_s < TRIAL_S else 0.5",
        "return 1.0 if self.since_taken_s < TRIAL_S else 0.0",
        ("tests/unit/gateway/live/test_failover.py",),
    ),
    Mutation(
        "tokens of two executors are spliced",
        "services/gateway/live/generation.py",
        "            return  # it was aborted there to go on elsewhere\n",
        "            self.continuation._ids.pop()\n            return\n",
        ("tests/integration/test_gateway_moves.py", "-k", "leave"),
    ),
    Mutation(
        "what is continued is numbered from zero",
        "services/gateway/executors/link.py",
        "num_known=0 if resume is None else resume.num_known_tokens,",
        "num_known=0,",
        ("tests/integration/test_gateway_moves.py", "-k", "would_have_been"),
    ),
    Mutation(
        "a form does not hear of what a client who comes again has",
        "services/gateway/http/answers.py",
        "            self._chunks.tokens(delivered, as_one=True)\n",
        "            pass\n",
        SENT_AGAIN,
    ),
    Mutation(
        "a client who comes again is told all once more",
        "services/gateway/live/continuation.py",
        "return tokens[num_old:]",
        "return tokens",
        SENT_AGAIN,
    ),
    Mutation(
        "what an executor has not told again is not told by the next one",
        "services/gateway/live/continuation.py",
        "output_ids=self._begun if num_retold else self._ids,",
        "output_ids=self._ids or self._begun,",
        SENT_AGAIN,
    ),
    Mutation(
        "a token too few is told again",
        f"{EXECUTOR}/engine/replay.py",
        "ending, first_told = None, len(output_ids) - num_retold",
        "ending, first_told = None, len(output_ids) - num_retold + 1",
        REPLAY,
    ),
    Mutation(
        "the deposit goes out when an executor is lost",
        "services/gateway/live/generation.py",
        "        final = error if self.is_over else self._holder.lost(error)\n",
        "        final = self._holder.lost(error)\n        self._paced.flush()\n",
        ("tests/unit/gateway/live",),
    ),
    Mutation(
        "identical is said across numerics",
        "services/gateway/live/failover/rules.py",
        "is_alike = before.numerics == after.numerics",
        "is_alike = True",
        ("tests/unit/gateway/live",),
    ),
    Mutation(
        "a hanging engine is not noticed",
        "services/gateway/executors/heartbeat.py",
        "if now_s - self._step_s > self._limits.engine_s:",
        "if False:",
        ("tests/unit/gateway/executors",),
    ),
    Mutation(
        "a gateway that stood still blames executors",
        "services/gateway/executors/heartbeat.py",
        "is_late = now_s - self._checked_s > 2 * CHECK_INTERVAL_S",
        "is_late = False",
        ("tests/unit/gateway/executors",),
    ),
    Mutation(
        "deposit off by one",
        "services/pacing/request_buffer.py",
        "            return self.num_generated - self.num_delivered\n",
        "            return self.num_generated - self.num_delivered + 1\n",
        ("tests/unit/pacing",),
    ),
    Mutation(
        "tokens earlier than the reader reads",
        "services/pacing/deposit.py",
        "    due_s = previous_due_s + interval_s\n",
        "    due_s = previous_due_s + 0.9 * interval_s\n",
        ("tests/unit/pacing", "tests/unit/gateway"),
    ),
    Mutation(
        "a thought takes a turn of its reader's pace",
        "services/gateway/live/pacer.py",
        "            if token.is_read:\n",
        "            if True:\n",
        ("tests/unit/gateway/live",),
    ),
    Mutation(
        "text keeps the call after it back",
        "services/gateway/live/generation.py",
        "            self._paced.flush()  # a program waits",
        "            pass  # a program waits",
        ("tests/unit/gateway/live",),
    ),
    Mutation(
        "text that goes out at once waits for the pace",
        "services/pacing/deposit.py",
        "            return 0.0\n        case Release.SMOOTH:",
        "            return math.inf\n        case Release.SMOOTH:",
        ("tests/unit/pacing",),
    ),
    Mutation(
        "what is on the screen counts as read",
        "services/pacing/request_buffer.py",
        "            if self._reads_what_comes:\n",
        "            if True:\n",
        ("tests/unit/pacing",),
    ),
    Mutation(
        "who thinks has a reader",
        "services/pacing/request_buffer.py",
        "if self.interval_s and self._reader.reads else 0.0",
        "if self.interval_s else 0.0",
        ("tests/unit/pacing", "tests/unit/control"),
    ),
    Mutation(
        "a request goes on though its reader has enough",
        "services/pacing/request_buffer.py",
        "return self.slack_s(now_s) >= (0.5 * most_s if rests else most_s)",
        "return False",
        ("tests/unit/pacing",),
    ),
    Mutation(
        "the scheduler does not hear where text begins",
        f"{EXECUTOR}/serving/session.py",
        "            self._engine.turn(live.engine_id, live.num_generated, reads=live.reads)\n",
        "            pass\n",
        ("tests/unit/executor/serving",),
    ),
    Mutation(
        "forms and calls that must be made are read",
        f"{EXECUTOR}/prompts/chat_parsers.py",
        "is_read=form is None and not options.tool_choice.is_forced,",
        "is_read=True,",
        ("tests/unit/executor/prompts/test_chat_parsers.py",),
    ),
    Mutation(
        "an operator's rate keeps text back",
        "services/gateway/live/dispatcher.py",
        "release = level.release or Release.AT_ONCE",
        "release = level.release",
        ("tests/integration/test_gateway_streams.py",),
    ),
    Mutation(
        "a reader that stops is the network's",
        "services/pacing/cause.py",
        "    return Cause.READER if reader_s >= network_s else Cause.NETWORK\n",
        "    return Cause.NETWORK\n",
        ("tests/unit/pacing", "tests/unit/gateway/live"),
    ),
    Mutation(
        "a step that is short enough is blamed",
        "services/pacing/token_time.py",
        "excess_s = max(0.0, own_s - (turn_s - self._since_s))",
        "excess_s = own_s",
        ("tests/unit/pacing",),
    ),
    Mutation(
        "the engine does not say why a token is late",
        f"{EXECUTOR}/scheduler/reader_state.py",
        "            output.kv_transfer_params = to_transfer_params(delay)\n",
        "            pass\n",
        ("tests/integration/test_slo_miss_causes.py",),
    ),
    Mutation(
        "an older sender overwrites a newer one",
        "services/tracker/memory_store.py",
        "if stored is not None and stored.offer.epoch > writer.epoch:",
        "if False:",
        ("tests/contract/test_tracker_store.py",),
    ),
    Mutation(
        "a prompt read before it is scored",
        f"{EXECUTOR}/engine/collector.py",
        "_scored_prompt(output, reporting) if tokens else ()",
        "_scored_prompt(output, reporting)",
        ("tests/unit/executor/engine/test_collector.py",),
    ),
    Mutation(
        "orphans of one look",
        f"{EXECUTOR}/serving/accounts.py",
        "lost, self._suspects = orphans & self._suspects, orphans",
        "lost, self._suspects = orphans, orphans",
        ("tests/unit/executor/serving/test_accounts.py",),
    ),
    Mutation(
        "no report before the engine idles",
        f"{EXECUTOR}/blocks/transfers/transfers.py",
        "STEPS_PER_STATS and owner.kvs and not failed",
        "STEPS_PER_STATS and not failed",
        ("tests/unit/executor/scheduler/test_scheduler.py",),
    ),
    Mutation(
        "windows end a block early",
        f"{EXECUTOR}/blocks/sides/side_groups.py",
        "max(0, num_tokens - window + 1) // self._size",
        "max(0, num_tokens - window + 1 + self._size) // self._size",
        SIDES,
    ),
    Mutation(
        "side blocks begin as they were left",
        f"{EXECUTOR}/blocks/sides/side_groups.py",
        "self._blocks.take_open(num_missing)",
        "self._blocks.take(num_missing)",
        SIDES,
    ),
    Mutation(
        "side blocks end unpoisoned",
        f"{EXECUTOR}/blocks/sides/side_groups.py",
        "self._blocks.poison(ended)",
        "pass",
        SIDES,
    ),
    Mutation(
        "side blocks without those in flight",
        "services/placement/blocks.py",
        "-(-(window - 1 + num_in_flight) // size) + 1",
        "-(-(window - 1) // size) + 1",
        SIDES,
    ),
    Mutation(
        "metadata of one kind for all",
        f"{EXECUTOR}/plugin/attention_memo.py",
        "return all(group.kv_cache_spec == groups[0].kv_cache_spec for group in groups)",
        "return True",
        ("tests/exact/test_kinds.py", "-m", "not nightly", "-k", "own_metadata"),
    ),
    Mutation(
        "metadata of another window",
        f"{EXECUTOR}/plugin/flash_attention.py",
        'window = getattr(self.kv_cache_spec, "sliding_window", None)',
        "window = None",
        ("tests/unit/executor/plugin/test_flash_attention.py",),
    ),
    Mutation(
        "a preempted request keeps copies without its windows",
        f"{EXECUTOR}/blocks/block_owner.py",
        "not self.side_copies.is_kept(old) or not (num_kept or old.num_side_tokens)",
        "not num_kept",
        SIDE_COPIES,
    ),
    Mutation(
        "a window leaves without its first block",
        "services/placement/blocks.py",
        "range(max(0, num_tokens - window + 1) // side_size, -(-num_tokens // side_size))",
        "range(max(0, num_tokens - window + 1) // side_size + 1, -(-num_tokens // side_size))",
        SIDE_COPIES,
    ),
    Mutation(
        "open blocks stay behind",
        "services/placement/blocks.py",
        "[range(num_tokens // size, -(-num_tokens // size))] * geometry.num_groups",
        "[range(0)] * geometry.num_groups",
        SIDE_COPIES,
    ),
    Mutation(
        "a request leaves before its full blocks are copied",
        f"{EXECUTOR}/blocks/sides/side_copies.py",
        "kv.mirrored and kv.num_host_blocks == kv.num_full_blocks",
        "kv.mirrored",
        SIDE_COPIES,
    ),
    Mutation(
        "a request leaves before its windows are copied",
        f"{EXECUTOR}/blocks/sides/side_copies.py",
        "0 < copy.step <= saved_step",
        "0 < copy.step",
        SIDE_COPIES,
    ),
    Mutation(
        "a copy outlives the next step",
        f"{EXECUTOR}/blocks/transfers/transfers.py",
        "                owner.side_copies.drop(kv)",
        "                pass",
        SIDE_COPIES,
    ),
    Mutation(
        "a request wakes up before its windows are back",
        f"{EXECUTOR}/blocks/transfers/moves.py",
        "not copies.is_coming(kv)",
        "True",
        SIDE_COPIES,
    ),
    Mutation(
        "windows that failed to leave come back",
        f"{EXECUTOR}/blocks/transfers/losses.py",
        "self._owner.side_copies.fail(feedback.failed_saves)",
        "pass",
        SIDE_COPIES,
    ),
    Mutation(
        "windows that failed to come back are waited for",
        f"{EXECUTOR}/blocks/transfers/losses.py",
        "if kv is not None:  # it waits for all of it",
        "if False:",
        SIDE_COPIES,
    ),
    Mutation(
        "a request waits for copies that were refused",
        f"{EXECUTOR}/blocks/transfers/transfers.py",
        "copy.step > 0 and not is_ordered",
        "False",
        SIDE_COPIES,
    ),
    Mutation(
        "windows on the host cost parked requests nothing",
        "services/placement/run/resume.py",
        "ResumeWay.HOST_RESIDENT: waits_s(first_bytes) + num_delayed",
        "ResumeWay.HOST_RESIDENT: num_delayed",
        ("tests/unit/placement/run/test_resume.py",),
    ),
    Mutation(
        "prefixes without their windows",
        f"{EXECUTOR}/scheduler/scheduler.py",
        "self.kv_options = replace(self.kv_options, prefix_caching=False)",
        "pass",
        ONE_KIND,
    ),
    Mutation(
        "blocks of states are not zeroed",
        f"{EXECUTOR}/scheduler/scheduler.py",
        "owner.blocks.notes_open = self.needs_kv_cache_zeroing",
        "pass",
        STATES,
    ),
    Mutation(
        "a plan does not count what never leaves",
        "services/placement/judging/plan_rules.py",
        "total += side_blocks(geometry, num_tokens=num_tokens, num_new_tokens=1 + ahead)",
        "pass",
        ("tests/unit/placement/judging/test_plan_rules.py",),
    ),
    Mutation(
        "the guard does not count what never leaves",
        f"{CONTROL}/room/capacity_guard.py",
        "num_side_blocks=share.num_side_blocks,",
        "num_side_blocks=0,",
        ("tests/unit/simulator/engine/test_guard.py",),
    ),
    Mutation(
        "run policies do not know what left beside full blocks",
        f"{CONTROL}/admission.py",
        "return max(num_blocks * self._engine.shape.block_size, kv.num_side_tokens)",
        "return num_blocks * self._engine.shape.block_size",
        ("tests/unit/simulator/engine/test_engine.py", "-k", "never_leave"),
    ),
    Mutation(
        "penalties begin anew in an answer that goes on",
        f"{EXECUTOR}/plugin/resumed_rows.py",
        "self.output_token_ids = list(begun.output_ids)",
        "pass",
        GOES_ON,
    ),
    Mutation(
        "a seed begins anew in an answer that goes on",
        f"{EXECUTOR}/plugin/resumed_rows.py",
        "draw.repeat(self.generator, len(begun.output_ids))",
        "pass",
        GOES_ON,
    ),
    Mutation(
        "a device's draws are not counted",
        f"{EXECUTOR}/plugin/resumed_rows.py",
        "generator.set_offset(start + step * num_tokens)",
        "pass",
        ("tests/unit/executor/plugin/test_resumed_rows.py",),
    ),
    Mutation(
        "a form begins anew in an answer that goes on",
        f"{EXECUTOR}/scheduler/reader_state.py",
        "if is_compiling and not advance(",
        "if False and not advance(",
        GOES_ON,
    ),
    Mutation(
        "an answer that goes on is new to vLLM, and its cached output ends the engine",
        f"{EXECUTOR}/scheduler/reader_state.py",
        "request.num_preemptions = 1",
        "pass",
        GOES_ON,
    ),
    Mutation(
        "workers are told to resume what they do not know",
        f"{EXECUTOR}/scheduler/reader_state.py",
        "request.status = RequestStatus.WAITING  # workers",
        "pass  # workers",
        ("tests/integration/test_executor_scheduler.py",),
    ),
    Mutation(
        "a form hears of thoughts without what is before them",
        f"{EXECUTOR}/prompts/form_progress.py",
        "growing.all_token_ids.append(id)",
        "pass",
        ("tests/unit/executor/prompts/test_form_progress.py",),
    ),
    Mutation(
        "text begins anew in an answer that goes on",
        f"{EXECUTOR}/engine/replay.py",
        "stop_string = detokenizer.update([id], at_stop_token)",
        "stop_string = None",
        REPLAY,
    ),
    Mutation(
        "half characters begin anew in an answer that goes on",
        f"{EXECUTOR}/engine/replay.py",
        "return token_logprobs(id, known[-1], 0)",
        "return token_logprobs(id, known.pop(), 0)",
        REPLAY,
    ),
    Mutation(
        "an answer that is complete goes on",
        f"{EXECUTOR}/engine/replay.py",
        "is_last = is_complete or stop_string is not None",
        "is_last = False",
        REPLAY,
    ),
    Mutation(
        "the front's half begins anew in an answer that goes on",
        f"{EXECUTOR}/engine/engine.py",
        "state.detokenizer, state.logprobs_processor = replayed.detokenizer, replayed.logprobs",
        "pass",
        ("tests/executors/test_executor_resume.py",),
    ),
    Mutation(
        "an answer goes on behind another prompt",
        f"{EXECUTOR}/prompts/resumption.py",
        "if resume.prompt_digest not in (0, prompt_digest(prompt_ids)):",
        "if False:",
        ("tests/unit/executor/prompts/test_resumption.py",),
    ),
    Mutation(
        "an answer goes on that its form does not allow",
        f"{EXECUTOR}/prompts/grammar_process.py",
        'return "" if _allows(matcher, ids) else NOT_THIS_ANSWER',
        'return ""',
        ("tests/integration/test_grammar_process.py",),
    ),
    Mutation(
        "an answer that goes on is counted from its first token again",
        f"{EXECUTOR}/serving/step_stream.py",
        "self._num_sent[request_id] = num_known",
        "self._num_sent[request_id] = 0",
        SERVING,
    ),
    Mutation(
        "a reader who comes with a deposit has none",
        "services/pacing/request_buffer.py",
        "self._reader.resumed(num_generated, last_due_s)",
        "pass",
        ("tests/unit/pacing/test_request_buffer.py",),
    ),
    Mutation(
        "KV of another type is the same",
        f"{EXECUTOR}/engine/fingerprint.py",
        '"kv": config.cache_config.cache_dtype,',
        '"kv": "",',
        ("tests/unit/executor/engine/test_fingerprint.py",),
    ),
    Mutation(
        "weights differ behind their beginning unnoticed",
        f"{EXECUTOR}/engine/fingerprint.py",
        "for n in range(1, NUM_PAGES + 1):",
        "for n in ():",
        ("tests/unit/executor/engine/test_fingerprint.py",),
    ),
    Mutation(
        "a newer stream of a gateway leaves the older one its requests",
        f"{EXECUTOR}/serving/front.py",
        "self._supersede(gateway_id, epoch)",
        "pass",
        SERVING,
    ),
    Mutation(
        "gateways do not hear that the engine steps",
        f"{EXECUTOR}/serving/front.py",
        "                session.beat()",
        "                pass",
        SERVING,
    ),
    Mutation(
        "gateways do not hear that an executor leaves",
        f"{EXECUTOR}/serving/front.py",
        "            session.leave()",
        "            pass",
        SERVING,
    ),
    Mutation(
        "what a moved answer has to compute is no prompt",
        "services/placement/run/types.py",
        "return not request.has_begun or request.num_left > most",
        "return not request.has_begun",
        ("tests/unit/placement/run/test_evenflow.py",),
    ),
    Mutation(
        "a moved answer is back at once",
        "services/placement/run/types.py",
        "way_s += self.costs.prompt_s(request.num_left)",
        "pass",
        ("tests/unit/placement/run/test_evenflow.py",),
    ),
    Mutation(
        "drafts fill blocks",
        f"{EXECUTOR}/scheduler/scheduler.py",
        "return int(min(num_tokens, request.num_tokens + in_flight))",
        "return num_tokens",
        DRAFTS,
    ),
    Mutation(
        "a block that drafts fill is staging at once",
        f"{EXECUTOR}/scheduler/coordinator.py",
        "growth.grow(request, num_tokens=num_tokens, num_accepted=num_accepted)",
        "growth.grow(request, num_tokens=num_tokens, num_accepted=num_tokens)",
        DRAFTS_OF_A_HEAD,
    ),
    Mutation(
        "copies that have not begun are complete",
        f"{EXECUTOR}/plugin/connector.py",
        "        if self._is_in_step:\n",
        "        if False:\n",
        ("tests/unit/executor/plugin/test_connector.py",),
    ),
    Mutation(
        "a step's copies are asked for before the drafter alone",
        f"{EXECUTOR}/plugin/worker.py",
        "output.kv_connector_worker_meta = connector.build_connector_worker_meta()",
        "pass",
        ("tests/unit/executor/plugin/test_worker.py",),
    ),
    Mutation(
        "the guard keeps no room for drafts",
        f"{CONTROL}/room/capacity_guard.py",
        "        if ahead:\n",
        "        if False:\n",
        ("tests/unit/executor/blocks/test_capacity_guard.py",),
    ),
    Mutation(
        "plans have no room for drafts",
        "services/planner/policy/window.py",
        "growth.ahead * growth.grows[r]",
        "0 * growth.grows[r]",
        ("tests/unit/planner/policy/test_problem.py",),
    ),
    Mutation(
        "layers that make drafts leave",
        f"{EXECUTOR}/plugin/spec.py",
        "windows |= _always_kept(drafts, max_model_len)",
        "full |= drafts",
        ("tests/unit/executor/plugin/test_spec.py",),
    ),
    Mutation(
        "what vLLM does not do beside drafts is asked of it",
        f"{EXECUTOR}/prompts/sampling.py",
        "for name in NOT_WITH_DRAFTS if drafts else ():",
        "for name in ():",
        ("tests/unit/executor/prompts/test_sampling.py",),
    ),
)


def copy_tree() -> None:
    """Copy what git knows, as it is now; packages, models and references are shared."""
    shutil.rmtree(COPY, ignore_errors=True)
    listed = subprocess.check_output(["git", "ls-files", "-co", "--exclude-standard"], cwd=ROOT)
    for name in filter(os.path.exists, listed.decode().splitlines()):
        target = COPY / name
        target.parent.mkdir(parents=True, exist_ok=True)
        shutil.copy2(ROOT / name, target)
    for stub in (ROOT / "protos").rglob("*_pb2*.py"):
        shutil.copy2(stub, COPY / stub.relative_to(ROOT))
    (COPY / ".cache").mkdir(exist_ok=True)
    for shared in ("models", "reference"):
        (COPY / ".cache" / shared).symlink_to(ROOT / ".cache" / shared)


def is_noticed(mutation: Mutation) -> bool:
    """Break one line in the copy, run the tests, and mend it again."""
    path = COPY / mutation.file
    text = path.read_text()
    assert text.count(mutation.right) == 1, f"{mutation.name}: the line is not there once"
    path.write_text(text.replace(mutation.right, mutation.wrong))
    try:
        return run(mutation.tests) == 1
    finally:
        path.write_text(text)


def run(tests: tuple[str, ...]) -> int:
    """Return pytest's exit status: 1 if tests failed."""
    log = COPY / "pytest.log"
    with log.open("w") as output:
        done = subprocess.run(
            [sys.executable, "-m", "pytest", "-x", "-q", *tests],
            cwd=COPY,
            env=os.environ | {"PYTHONPATH": f"{COPY}{os.pathsep}{COPY / 'protos'}"},
            stdout=output,
            stderr=subprocess.STDOUT,
            check=False,
            timeout=TIMEOUT_S,
        )
    assert done.returncode in (0, 1), f"{tests}: see {log}"
    return done.returncode


def main() -> int:
    chosen = [m for m in MUTATIONS if not sys.argv[1:] or m.name in sys.argv[1:]]
    copy_tree()
    unnoticed = []
    for mutation in chosen:
        begin_s = time.monotonic()
        noticed = is_noticed(mutation)
        unnoticed += [] if noticed else [mutation.name]
        verdict = "noticed" if noticed else "NOT NOTICED"
        print(f"{mutation.name:45} {verdict} ({time.monotonic() - begin_s:.0f} s)", flush=True)
    return int(bool(unnoticed))


if __name__ == "__main__":
    sys.exit(main())
