"""What a committed step's tokens mean: appended, streamed, or the end of a request."""

from __future__ import annotations

from typing import TYPE_CHECKING

from runtime.request import Finish, FinishReason, RequestOutput

if TYPE_CHECKING:
    from collections.abc import Sequence

    from runtime.request import Request, TokenLogprobs
    from runtime.runner import StepOutput
    from runtime.scheduling.schedule_batch import ScheduleBatch

LENGTH = Finish(FinishReason.LENGTH)


def apply_results(
    batch: ScheduleBatch, output: StepOutput, void: Sequence[Request] = ()
) -> tuple[list[RequestOutput], list[RequestOutput]]:
    """Appends a step's tokens to their requests.

    Rows of requests that have ended, or whose ending is recorded, are dropped: they were in this
    step before that was known. Cost: under a microsecond per row.

    Args:
        void: requests whose rows are dropped as well, since what they read was wrong.

    Returns: one output per live sampled row, and those of them whose request is to be ended.
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
