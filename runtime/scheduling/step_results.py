"""Applies the result of a step: its tokens are appended to their requests and may end them;
prompts that have given one may be kept. The rows of a step that failed are tried again."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from runtime.request import Finish, FinishReason, RequestOutput

if TYPE_CHECKING:
    from collections.abc import Sequence

    from runtime.request import Request, TokenLogprobs
    from runtime.runner import StepOutput
    from runtime.scheduling.kv_memory import KVMemory
    from runtime.scheduling.lifecycle import InFlight
    from runtime.scheduling.schedule_batch import Admitted, ScheduleBatch

LENGTH = Finish(FinishReason.LENGTH)


def apply_results(
    batch: ScheduleBatch, output: StepOutput, void: Sequence[Request] = ()
) -> tuple[list[RequestOutput], list[RequestOutput]]:
    """Appends a step's tokens to their requests.

    Rows of requests that have ended, or whose ending is recorded, are dropped: they were in this
    step before that was known. Cost: under a microsecond per row.

    Args:
        void: requests whose rows are dropped as well, since what they read was wrong.

    Returns: one output per live sampled row; those of these outputs that end their request.
    """
    if output.prompt_logprobs:
        _gather_prompt_logprobs(batch, output)
    requests = batch.requests
    if len(batch.sampled) < len(requests):
        requests = [requests[row] for row in batch.sampled]
    outputs: list[RequestOutput] = []
    ended: list[RequestOutput] = []
    logprobs, failed = output.logprobs, output.failed
    for index, (request, token) in enumerate(zip(requests, output.token_ids, strict=True)):
        if request.finish is not None or request.ending is not None:
            continue
        if void and request in void:
            continue
        if failed and index in failed:
            finish = Finish(FinishReason.ERROR, message=failed[index])
            ended.append(RequestOutput(request, [], finish=finish))
            outputs.append(ended[-1])
            continue
        ids = request.output_ids
        ids.append(token)
        news = RequestOutput(request, [token])
        if token in request.scheduling.stop_ids and len(ids) > request.sampling.min_tokens:
            news.finish = Finish(FinishReason.STOP, matched=token)
            ended.append(news)
        elif len(ids) >= request.max_new_tokens:
            news.finish = LENGTH
            ended.append(news)
        if logprobs is not None:
            news.logprobs = _one(logprobs[index])
        if request.prompt_logprobs is not None:
            news.prompt_logprobs, request.prompt_logprobs = request.prompt_logprobs, None
        outputs.append(news)
    return outputs, ended


def _one(entry: TokenLogprobs | None) -> list[TokenLogprobs] | None:
    return None if entry is None else [entry]


def _gather_prompt_logprobs(batch: ScheduleBatch, output: StepOutput) -> None:
    for row, entries in sorted(output.prompt_logprobs.items()):
        request: Request = batch.requests[row]
        gathered = request.prompt_logprobs
        if gathered is not None and request.finish is None:
            missing = len(request.input_ids) - len(gathered)
            gathered.extend(entries[:missing])


def keep_prompts(batch: ScheduleBatch, output: StepOutput, memory: KVMemory, now: float) -> None:
    """The KV of prompts that have given a token is finite: only from then on may they be copied to
    the tier, and be pinned as their clients ask, if these are still there to ask."""
    for index, row in enumerate(batch.sampled):
        if row >= batch.num_prefill:
            break
        request = batch.requests[row]
        if index in output.failed or memory.is_lost(request):
            continue
        if memory.tier is not None:
            request.scheduling.verified = True
            memory.tier.write_behind.mark_verified(request)
        if request.pins and request.finish is None and request.ending is None:
            memory.pin(request, now)


class StepRetries:
    """A failed step's rows, tried again by halves until the guilty one is alone.

    One row that a step cannot compute must not end the others. So a step that fails is taken back,
    and its rows are launched again as two steps, one after the other, as they were: the same tokens
    at the same positions. A half that fails is halved again. With k rows of which one is guilty
    that takes about 2 log2(k) steps, and nobody else loses anything but that time.
    """

    def __init__(self) -> None:
        # Prefill and decode rows still to be launched, those together first that are last here.
        self._parts: list[tuple[list[Admitted], list[Request]]] = []
        self._touched: set[Request] = set()  # rows that the device may have changed

    def touched(self, flights: Sequence[InFlight]) -> None:
        """Steps were taken back after the device may have run them, in part or whole."""
        for flight in flights:
            self._touched.update(flight.batch.requests)

    def add(self, failed: InFlight) -> None:
        """The rows of a failed step are to be tried again, before what is left of others. Where
        some have ended, nobody knows yet whether the others can be computed together."""
        starts = {item.request: replace(item, match=None) for item in failed.prefills}
        rows = [request for request in failed.batch.requests if not failed.gave_up(request)]
        half = (len(rows) + 1) // 2 if len(rows) == len(failed.batch.requests) else len(rows)
        for part in (rows[half:], rows[:half]):
            prefills = [starts[request] for request in part if request in starts]
            decodes = [request for request in part if request not in starts]
            self._parts.append((prefills, decodes))

    def take(self) -> tuple[list[Admitted], list[Request]] | None:
        """The rows of the next part, without those that have ended meanwhile; None: nothing is
        left."""
        while self._parts:
            part = self._parts.pop()
            prefills = [item for item in part[0] if _goes_on(item.request)]
            decodes = [request for request in part[1] if _goes_on(request)]
            if prefills or decodes:
                return prefills, decodes
        return None

    def take_touched(
        self, prefills: Sequence[Admitted], decodes: Sequence[Request]
    ) -> list[Request]:
        """Those of the next step's requests that the device must restore before it."""
        if not self._touched:
            return []
        requests = [*(item.request for item in prefills), *decodes]
        restore = [request for request in requests if request in self._touched]
        self._touched.difference_update(restore)
        self._touched = {r for r in self._touched if r.finish is None and r.row >= 0}
        return restore


def _goes_on(request: Request) -> bool:
    """Whether a row that waits for its turn is still there: it may have ended, or be back in the
    queue."""
    return request.finish is None and request.row >= 0
