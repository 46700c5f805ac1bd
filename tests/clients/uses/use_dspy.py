"""DSPy: predictions in its own format and in JSON, tools, and streams."""

from __future__ import annotations

import dspy
from common import FORECAST, KEY, MODEL, QUESTION, TEXT, URL, equal, run, say

OPTIONS = {"api_base": URL + "/v1", "api_key": KEY, "cache": False, "num_retries": 0}
model = dspy.LM(f"openai/{MODEL}", **OPTIONS)
dspy.configure(lm=model)
DONE = "[[ ## completed ## ]]"


def answer(**fields: str) -> str:
    """A prompt that is answered with these fields, as DSPy writes them."""
    return say("\n\n".join(f"[[ ## {n} ## ]]\n{v}" for n, v in fields.items()) + f"\n\n{DONE}")


def predict() -> None:
    equal(dspy.Predict("question -> answer")(question=answer(answer="Paris")).answer, "Paris")
    thought = dspy.ChainOfThought("question -> answer: int")
    found = thought(question=answer(reasoning="6 * 7", answer="42"))
    equal((found.reasoning, found.answer), ("6 * 7", 42))


def structured() -> None:
    with dspy.context(adapter=dspy.JSONAdapter()):
        found = dspy.Predict("question -> name: str, born: int")(
            question=say('{"name": "Ada", "born": 1815}')
        )
    equal((found.name, found.born), ("Ada", 1815))


def get_weather(city: str) -> str:
    """The weather of a city."""
    done = {"next_thought": "Done.", "next_tool_name": "finish", "next_tool_args": "{}"}
    return answer(**done, reasoning="The tool says it.", answer=FORECAST + city)


def tools() -> None:
    agent = dspy.ReAct("question -> answer", tools=[get_weather], max_iters=3)
    call = {"next_tool_name": "get_weather", "next_tool_args": '{"city": "Paris"}'}
    found = agent(question=answer(next_thought="Ask.", **call))
    equal(found.answer, FORECAST + "Paris")
    equal(found.trajectory["tool_args_0"], {"city": "Paris"})


def two_turns() -> None:
    history = dspy.History(messages=[{"question": "Hello?", "answer": "Hi."}])
    signature = dspy.Signature("history: dspy.History, question -> answer")
    found = dspy.Predict(signature)(history=history, question=answer(answer=FORECAST))
    equal(found.answer, FORECAST)
    roles = [message["role"] for message in model.history[-1]["messages"]]
    equal(roles, ["system", "user", "assistant", "user"])


async def asynchronous() -> None:
    equal((await model.acall(QUESTION))[0], TEXT)
    program = dspy.streamify(
        dspy.Predict("question -> answer"),
        stream_listeners=[dspy.streaming.StreamListener(signature_field_name="answer")],
    )
    text = ""
    async for piece in program(question=answer(answer="It is raining in Paris today.")):
        if isinstance(piece, dspy.streaming.StreamResponse):
            text += piece.chunk
        elif isinstance(piece, dspy.Prediction):
            equal(piece.answer, "It is raining in Paris today.")
    # It looks for the end within ten chunks, and a chunk of this model's is one byte.
    equal(text.partition("[[")[0].strip(), "It is raining in Paris today.")


run(predict, structured, tools, two_turns, asynchronous)
