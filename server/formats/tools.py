"""The `tools` of a request: what was offered, and what may or must be called."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from runtime.errors import InvalidRequest, shown

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence


@dataclass(frozen=True, slots=True)
class Tool:
    """A function that the model may call. Args: strict: arguments must follow `parameters`."""

    name: str
    description: str | None
    parameters: dict[str, Any]
    strict: bool

    @property
    def parameter_names(self) -> tuple[str, ...]:
        """In the order of the schema."""
        properties = self.parameters.get("properties")
        return tuple(properties) if isinstance(properties, dict) else ()

    def openai(self) -> dict[str, Any]:
        """The tool as chat templates expect it."""
        function: dict[str, Any] = {"name": self.name}
        if self.description is not None:
            function["description"] = self.description
        return {"type": "function", "function": {**function, "parameters": self.parameters}}


@dataclass(frozen=True, slots=True)
class ToolRequest:
    """The tools of a request and whether they must be called.

    Args:
        tools: all that were offered.
        callable: names of those that may be called.
        required: the answer must be a call.
        parallel: it may be several.
    """

    tools: tuple[Tool, ...]
    callable: tuple[str, ...]
    required: bool
    parallel: bool

    @property
    def enforced(self) -> bool:
        """Some tool's schema rules the answer."""
        return self.required or any(tool.strict for tool in self.allowed)

    @property
    def allowed(self) -> tuple[Tool, ...]:
        callable = frozenset(self.callable)
        return tuple(tool for tool in self.tools if tool.name in callable)


def parse_tools(
    tools: Sequence[Mapping[str, Any]] | None, choice: Any = None, *, parallel: bool = True
) -> ToolRequest | None:
    """The tools that an answer may call; None: none.

    Args: tools, choice: in OpenAI's form, right by themselves.
    Raises: InvalidRequest: a name that is offered twice, or chosen and not offered.
    """
    if not tools:
        if choice not in (None, "none", "auto"):
            raise InvalidRequest("tool_choice: is given without tools", param="tool_choice")
        return None
    offered: dict[str, Tool] = {}
    for one in tools:
        tool = _tool(one["function"])
        if tool.name in offered:
            raise InvalidRequest(f"tools: {shown(tool.name)} is offered twice", param="tools")
        offered[tool.name] = tool
    allowed, required = _choice(choice, list(offered))
    if not allowed:
        return None
    named = isinstance(choice, dict) and choice["type"] == "function"  # asks for one call
    return ToolRequest(tuple(offered.values()), allowed, required, parallel and not named)


def _tool(function: Mapping[str, Any]) -> Tool:
    parameters = function.get("parameters") or {"type": "object", "properties": {}}
    return Tool(
        function["name"], function.get("description"), parameters, bool(function.get("strict"))
    )


def _choice(choice: Any, names: Sequence[str]) -> tuple[tuple[str, ...], bool]:
    """Which tools may be called, and whether one must be."""
    if choice is None or isinstance(choice, str):
        return (() if choice == "none" else tuple(names)), choice == "required"
    required = True
    wanted = [choice]
    if choice["type"] == "allowed_tools":
        # /v1/responses has the list beside the type, and names without a holder.
        listed = choice.get("allowed_tools", choice)
        wanted, required = listed["tools"], listed["mode"] == "required"
    found = tuple(one.get("function", one)["name"] for one in wanted)
    offered = frozenset(names)
    for name in found:
        if name not in offered:
            raise InvalidRequest(
                f"tool_choice: names {shown(name)}, which is not among the tools",
                param="tool_choice",
            )
    return found, required
