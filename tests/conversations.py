"""Sample conversations, and a fixed date for chat templates."""

import datetime
import json


def user(text):
    return {"role": "user", "content": text}


def assistant(text, **more):
    return {"role": "assistant", "content": text, **more}


def system(text):
    return {"role": "system", "content": text}


def tool(text):
    return {"role": "tool", "name": "look", "tool_call_id": "call00001", "content": text}


def parts(text):
    return [{"type": "text", "text": text}]


def call(arguments):
    function = {"name": "look", "arguments": arguments}
    return [{"id": "call00001", "type": "function", "function": function}]


ARGUMENTS = {"city": "kiwi", "days": 3, "deep": {"list": [1, "lime"]}}
TOOLS = [
    {
        "type": "function",
        "function": {
            "name": "look",
            "description": "mango",
            "parameters": {
                "type": "object",
                "properties": {"city": {"type": "string", "description": "melon"}},
                "required": ["city"],
            },
        },
    }
]
CONVERSATIONS = {
    "one turn": ([user("apple?"), assistant("banana split")], {}),
    "two turns": ([user("apple?"), assistant("banana"), user("cherry?"), assistant("damson")], {}),
    "system": (
        [system("elder"), user("apple?"), assistant("banana"), user("cherry?"), assistant("quince")],
        {},
    ),
    "empty system": ([system(""), user("apple?"), assistant("banana")], {}),
    "reasoning": (
        [
            user("apple?"),
            assistant("banana", reasoning_content="grape"),
            user("cherry?"),
            assistant("damson", reasoning_content="hazel"),
        ],
        {},
    ),
    "reasoning in the text": (
        [
            user("apple?"),
            assistant("<think>\ngrape\n</think>\n\nbanana"),
            user("cherry?"),
            assistant("<think>\nhazel\n</think>\n\ndamson"),
        ],
        {},
    ),
    "no reasoning": (
        [user("apple?"), assistant("banana"), user("cherry?"), assistant("damson")],
        {"enable_thinking": False},
    ),
    "reasoning asked for": ([user("apple?"), assistant("banana")], {"enable_thinking": True}),
    "tools": (
        [user("apple?"), assistant("", tool_calls=call(ARGUMENTS)), tool("figs"), assistant("banana")],
        {"tools": TOOLS},
    ),
    "tools and text": (
        [
            user("apple?"),
            assistant("banana", tool_calls=call(ARGUMENTS)),
            tool("figs"),
            assistant("cherry"),
            user("damson?"),
            assistant("elder"),
        ],
        {"tools": TOOLS},
    ),
    "tools and reasoning": (
        [
            user("apple?"),
            assistant("", reasoning_content="grape", tool_calls=call(ARGUMENTS)),
            tool("figs"),
            assistant("banana", reasoning_content="hazel"),
        ],
        {"tools": TOOLS},
    ),
    "arguments as text": (
        [
            user("apple?"),
            assistant(None, tool_calls=call(json.dumps(ARGUMENTS))),
            tool("figs"),
            assistant("pear"),
        ],
        {"tools": TOOLS},
    ),
    "ends with a call": (
        [user("apple?"), assistant("", tool_calls=call(ARGUMENTS))],
        {"tools": TOOLS},
    ),
    "ends with a question": ([user("apple?"), assistant("banana"), user("cherry?")], {}),
    "begins with an answer": ([assistant("banana"), user("apple?"), assistant("cherry")], {}),
    "no words of ASCII": ([user("Grüße 漢字 🙂?"), assistant("ß 🙂 <b>ﬁ</b> &amp; {{ y }} é")], {}),
    "white space": (
        [user("  apple? \n"), assistant(" \n banana\n\n split \n"), user("x"), assistant("\ty ")],
        {},
    ),
    "text that looks special": (
        [user("<|im_end|> [/INST] <eos>"), assistant("<|im_start|>assistant\n<|eot_id|> <end_of_turn> x")],
        {},
    ),
    "the same text": ([user("pear"), assistant("pear"), user("assistant"), assistant("assistant")], {}),
    "text of the header": (
        [user("model"), assistant("assistant\n"), user("\n"), assistant("model: Assistant:")],
        {},
    ),
    "parts": (
        [
            user(parts("apple?")),
            assistant(parts("banana")),
            user(parts("cherry?")),
            assistant(parts("damson")),
        ],
        {},
    ),
}


class OnePinnedDay(datetime.datetime):
    """Datetime fixed at the date of our renderings, since transformers' uses today's."""

    @classmethod
    def now(cls):
        return cls(2024, 7, 26)
