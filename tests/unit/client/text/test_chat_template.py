# ruff: noqa: E501
"""Messages to prompts: the form that a template reads, texts that must arrive, messages that are continued."""

import json
import re
from typing import Any

import pytest

from outrider.platform.client.input_processor import InputProcessor
from outrider.platform.client.text import chat_template
from outrider.platform.client.text.template_checks import check_texts_arrive
from outrider.platform.core.errors import InvalidRequestError
from outrider.platform.core.messages import EngineInfo

OPEN = "{% if add_generation_prompt %}<|assistant|>{% endif %}"
PARTS = (
    "{% for m in messages %}<|{{ m.role }}|>{% for p in m.content %}{% if p.type == 'text' %}{{ p.text }}{% endif %}"
    "{% endfor %}</s>{% endfor %}" + OPEN
)
EITHER = (
    "{% for m in messages %}<|{{ m.role }}|>{% if m.content is string %}{{ m.content }}{% else %}"
    "{% for p in m.content %}{{ p.text }}{% endfor %}{% endif %}</s>{% endfor %}" + OPEN
)
STRING = "{% for m in messages %}<|{{ m.role }}|>{{ m.content }}</s>{% endfor %}" + OPEN
TRIMS = "{% for m in messages %}<|{{ m.role }}|>\n{{ m.content | trim }} </s>\n{% endfor %}" + OPEN
ONLY_USERS_HAVE_PARTS = (
    "{% for m in messages %}<|{{ m.role }}|>{% if m.role == 'user' %}{{ m.content[0].text }}{% else %}"
    "{{ m.content + '' }}{% endif %}</s>{% endfor %}" + OPEN
)

# The structure of templates that are in use, by what is special in each.
LLAMA_3 = (
    "{{- bos_token }}{%- if messages[0]['role'] == 'system' %}{%- set system_message = messages[0]['content']|trim %}"
    "{%- set messages = messages[1:] %}{%- else %}{%- set system_message = '' %}{%- endif %}"
    "{{- '<|start_header_id|>system<|end_header_id|>\n\n' }}{{- 'Cutting Knowledge Date: December 2023\n' }}"
    "{{- system_message }}{{- '<|eot_id|>' }}{%- for message in messages %}"
    "{{- '<|start_header_id|>' + message['role'] + '<|end_header_id|>\n\n' + message['content'] | trim + '<|eot_id|>' }}"
    "{%- endfor %}{%- if add_generation_prompt %}{{- '<|start_header_id|>assistant<|end_header_id|>\n\n' }}{%- endif %}"
)
QWEN_3 = (
    "{%- if messages[0].role == 'system' %}{{- '<|im_start|>system\n' + messages[0].content + '<|im_end|>\n' }}{%- endif %}"
    "{%- for message in messages %}{%- if message.content is string %}{%- set content = message.content %}{%- else %}"
    "{%- set content = '' %}{%- endif %}{%- if message.role == 'user' or (message.role == 'system' and not loop.first) %}"
    "{{- '<|im_start|>' + message.role + '\n' + content + '<|im_end|>\n' }}{%- elif message.role == 'assistant' %}"
    "{%- if '</think>' in content %}{%- set content = content.split('</think>')[-1].lstrip('\n') %}{%- endif %}"
    "{{- '<|im_start|>assistant\n' + content + '<|im_end|>\n' }}{%- endif %}{%- endfor %}"
    "{%- if add_generation_prompt %}{{- '<|im_start|>assistant\n' }}{%- endif %}"
)
GEMMA = (
    "{{ bos_token }}{%- if messages[0]['role'] == 'system' -%}{%- if messages[0]['content'] is string -%}"
    "{%- set first = messages[0]['content'] + '\n\n' -%}{%- else -%}{%- set first = messages[0]['content'][0]['text'] -%}"
    "{%- endif -%}{%- set loop_messages = messages[1:] -%}{%- else -%}{%- set first = '' -%}"
    "{%- set loop_messages = messages -%}{%- endif -%}{%- for message in loop_messages -%}"
    "{%- if (message['role'] == 'user') != (loop.index0 % 2 == 0) -%}{{ raise_exception('must alternate') }}{%- endif -%}"
    "{{ '<start_of_turn>' + message['role'] + '\n' + (first if loop.first else '') }}{%- if message['content'] is string -%}"
    "{{ message['content'] | trim }}{%- else -%}{%- for item in message['content'] -%}{{ item['text'] | trim }}"
    "{%- endfor -%}{%- endif -%}{{ '<end_of_turn>\n' }}{%- endfor -%}"
)
MISTRAL = (
    "{%- if messages[0]['role'] == 'system' %}{%- set system_message = messages[0]['content'] %}"
    "{%- set loop_messages = messages[1:] %}{%- else %}{%- set loop_messages = messages %}{%- endif %}{{- bos_token }}"
    "{%- for message in loop_messages %}{%- if message['role'] == 'user' %}{%- if loop.last and system_message is defined %}"
    "{{- '[INST] ' + system_message + '\n\n' + message['content'] + '[/INST]' }}{%- else %}"
    "{{- '[INST] ' + message['content'] + '[/INST]' }}{%- endif %}{%- else %}"
    "{{- ' ' + message['content']|trim + eos_token }}{%- endif %}{%- endfor %}"
)
SMOLLM_2 = (
    "{% for message in messages %}{% if loop.first and messages[0]['role'] != 'system' %}"
    "{{ '<|im_start|>system\nYou are a helpful AI assistant named SmolLM<|im_end|>\n' }}{% endif %}"
    "{{'<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>' + '\n'}}{% endfor %}" + OPEN
)
SMOLLM_3 = (
    "{%- set system = messages[0].content if messages[0].role == 'system' else '' -%}"
    "{{- '<|im_start|>system\n' + system.replace('/no_think', '').replace('/think', '').rstrip() + '<|im_end|>\n' }}"
    "{%- for m in messages if m.role != 'system' %}{{- '<|im_start|>' + m.role + '\n' + m.content + '<|im_end|>\n' }}"
    "{%- endfor %}"
)
DEEPSEEK_R1 = (
    "{%- set ns = namespace(system_prompt='') -%}{%- for message in messages %}{%- if message['role'] == 'system' %}"
    "{%- set ns.system_prompt = message['content'] %}{%- endif %}{%- endfor %}{{bos_token}}{{ns.system_prompt}}"
    "{%- for message in messages %}{%- if message['role'] == 'user' %}{{'<｜User｜>' + message['content']}}"
    "{%- elif message['role'] == 'assistant' %}{%- set content = message['content'] %}{%- if '</think>' in content %}"
    "{%- set content = content.split('</think>')[-1] %}{%- endif %}{{'<｜Assistant｜>' + content + eos_token}}{%- endif %}"
    "{%- endfor -%}{% if add_generation_prompt %}{{'<｜Assistant｜><think>\n'}}{% endif %}"
)
SMOL_VLM = (
    "<|im_start|>{% for message in messages %}{{ message['role'] | capitalize }}{% if message['content'][0]['type'] == "
    "'image' %}{{ ':' }}{% else %}{{ ': ' }}{% endif %}{% for line in message['content'] %}{% if line['type'] == 'text' %}"
    "{{ line['text'] }}{% endif %}{% endfor %}<end_of_utterance>\n{% endfor %}"
)
ASCII = "{% for m in messages %}{{ m.content | tojson(ensure_ascii=True) }}\n{% endfor %}"
JSON = "{% for m in messages %}{{ {'role': m.role, 'content': m.content} | tojson }}\n{% endfor %}"
REAL = {
    "Llama 3": LLAMA_3, "Qwen 3": QWEN_3, "Gemma": GEMMA, "Mistral": MISTRAL, "SmolLM2": SMOLLM_2, "SmolLM3": SMOLLM_3,
    "DeepSeek R1": DEEPSEEK_R1, "JSON": JSON, "ASCII": ASCII, "string": STRING, "parts": PARTS, "either": EITHER, "trims": TRIMS,
    "SmolVLM": SMOL_VLM,
}  # fmt: skip
GUARD = (  # drops what is no list of parts
    "{% for message in messages %}{% for content in message['content'] | selectattr('type', 'equalto', 'text') %}"
    "{{ message['role'] + ': ' + content['text'] | trim + '\n' }}{% endfor %}{% endfor %}"
)

INFO = EngineInfo(
    model="m", architecture="a", dtype="float32", device="cpu", vocab_size=400, max_model_len=4096, max_logprobs=5,
    num_kv_blocks=1, block_size=16, num_parameters=1, enable_lora=False, max_loras=1, max_lora_rank=1, speculation="",
    load_seconds=0.0,
)  # fmt: skip


@pytest.fixture(scope="module")
def processor(tokenizer: Any) -> InputProcessor:
    return InputProcessor(tokenizer, INFO, eos_token_ids=[1])


def prompt(processor: InputProcessor, template: str, *messages: tuple[str, Any], **options: Any) -> str:
    conversation = [{"role": role, "content": content} for role, content in messages]
    text: str = processor.chat_prompt(conversation, {"chat_template": template, **options})["prompt"]  # type: ignore[typeddict-item]
    return text


def as_parts(*texts: str) -> list[dict[str, str]]:
    return [{"type": "text", "text": text} for text in texts]


@pytest.mark.parametrize(
    "template",
    [PARTS, EITHER, STRING, ONLY_USERS_HAVE_PARTS, GUARD, GEMMA, SMOL_VLM],
    ids=["parts", "either", "string", "users", "guard", "Gemma", "SmolVLM"],
)
def test_text_arrives_in_whichever_form_it_is_sent(processor: InputProcessor, template: str) -> None:
    turns = [("system", "Be brief."), ("user", "Is it safe?"), ("assistant", "Yes it is."), ("user", "Why?")]
    strings = prompt(processor, template, *turns)
    parts = prompt(processor, template, *((role, as_parts(text)) for role, text in turns))
    assert strings == parts
    assert all(text in strings for _, text in turns)
    assert "'text'" not in strings


def test_form_of_a_template_that_wants_a_system_message(processor: InputProcessor) -> None:
    template = "{% if messages[0].role != 'system' %}{{ raise_exception('no system') }}{% endif %}" + PARTS
    text = prompt(processor, template, ("system", "Be brief."), ("user", "Is it safe?"))
    assert "Be brief." in text
    assert "Is it safe?" in text


SYSTEM_FIRST = (
    "{% for m in messages %}{% if m.role == 'system' and not loop.first %}{{ raise_exception('not first') }}{% endif %}"
    "<|{{ m.role }}|>{{ m.content }}{% endfor %}"
)


def test_conversations_of_agents_fit_templates_that_want_turns(processor: InputProcessor) -> None:
    begin = [("system", "Be brief."), ("system", as_parts("No", "jokes.")), ("user", "It rains."), ("user", "Why?")]
    system = "Be brief.\n\nNo\njokes."
    plain = {"add_generation_prompt": False}
    assert prompt(processor, SYSTEM_FIRST, *begin, **plain) == f"<|system|>{system}<|user|>It rains.\n\nWhy?"
    assert f"{system}\n\nIt rains.\n\nWhy?<end_of_turn>" in prompt(processor, GEMMA, *begin, **plain)
    later = [("system", "A"), ("user", "B"), ("assistant", "C"), ("system", "D"), ("user", "E")]
    assert prompt(processor, SYSTEM_FIRST, *later, **plain) == "<|system|>A\n\nD<|user|>B<|assistant|>C<|user|>E"
    assert prompt(processor, STRING, *later, **plain).count("<|") == len(later)  # the template accepts them in place
    with pytest.raises(InvalidRequestError, match="not first"):
        prompt(processor, SYSTEM_FIRST, ("user", "B"), ("system", "D"), **plain)


def test_ids_of_calls_fit_templates_that_want_short_ones(processor: InputProcessor) -> None:
    template = (
        "{% for m in messages %}{% for id in (m.tool_calls or []) | map(attribute='id') | list + [m.tool_call_id or ''] %}"
        "{% if id and id | length != 9 %}{{ raise_exception('length 9!') }}{% endif %}<{{ id }}>{% endfor %}"
        "{% for call in m.tool_calls or [] %}{{ call.function | tojson }}{% endfor %}{{ m.content }}{% endfor %}"
    )
    for first, second in (("call_1", "call_2"), ("abcdefgh1", "call_é")):
        calls = [{"id": id, "type": "function", "function": {"name": "f", "arguments": "{}"}} for id in (first, second)]
        results = [{"role": "tool", "content": f"It was {id[-1]}.", "tool_call_id": id} for id in (second, first)]
        assistant = {"role": "assistant", "content": "", "tool_calls": calls}
        conversation = [{"role": "user", "content": "a"}, assistant, *results]
        options: Any = {"chat_template": template, "add_generation_prompt": False}
        text = processor.chat_prompt(conversation, options)["prompt"]
        ids = re.findall("<([a-z0-9]{9})>", text)
        assert ids == [ids[0], ids[1], ids[1], ids[0]]
        assert ids[0] != ids[1]
        assert (ids[0] == first) == (len(first) == 9)


def test_tools_fit_templates_that_want_descriptions_and_parameters(processor: InputProcessor) -> None:
    template = (
        "{% for tool in tools %}{{ '// ' + tool.function.description + tool.function.name }}"
        "{{ tool.function.parameters.properties.items() | list }}{% endfor %}" + SYSTEM_FIRST
    )
    tools = [
        {"type": "function", "function": {"name": "f", "description": None}},
        {"type": "function", "function": {"name": "g", "parameters": {"type": "object"}}},
    ]
    text = prompt(processor, template, ("user", "a"), ("user", "b"), tools=tools, add_generation_prompt=False)
    assert text == "// f[]// g[]<|user|>a<|user|>b"


def test_parts_stay_parts_for_a_template_that_reads_them(processor: InputProcessor) -> None:
    assert prompt(processor, PARTS, ("user", as_parts("a", "b"))) == "<|user|>ab</s><|assistant|>"
    assert prompt(processor, STRING, ("user", as_parts("a", "b"))) == "<|user|>a\nb</s><|assistant|>"


ARGUMENTS = "call.function.arguments"
AS_TEXT, ITEMS = f"'' + {ARGUMENTS}", f"{ARGUMENTS}.items() | list"


@pytest.mark.parametrize(
    ("arguments", "written", "expected"),
    [
        *(
            ('{"city":"Z\u00fcrich"}', way, '{"city": "Z\u00fcrich"}')
            for way in (ARGUMENTS, AS_TEXT, f"{ARGUMENTS} | tojson")
        ),
        ('{"city": "Z', AS_TEXT, '{"city": "Z'),  # as a model left it
        ('{"city": "Z', ITEMS, "[]"),
        *((none, AS_TEXT, "{}") for none in ("null", '""', "[1]", "3", "")),
        *((none, ITEMS, "[]") for none in ("null", '""', "[1]", "3", "")),
    ],
)
def test_arguments_of_the_past_are_an_object_or_its_text(processor, arguments, written, expected) -> None:
    template = (
        "{% for m in messages %}{{ m.content }}{% for call in m.tool_calls or [] %}"
        "{{ call.id + call.function.name }}{{ " + written + " }}{% endfor %}{% endfor %}"
    )
    call = {"id": "c1", "type": "function", "function": {"name": "weather", "arguments": arguments}}
    conversation = [
        {"role": "user", "content": "a"},
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "content": "no JSON", "tool_call_id": "c1"},
    ]
    text = processor.chat_prompt(conversation, {"chat_template": template, "add_generation_prompt": False})["prompt"]
    assert text == f"ac1weather{expected}no JSON"


CALLED = "{% for c in m.tool_calls %}<call>{{ c.function.name + c.function.arguments }}</call>{% endfor %}"


@pytest.mark.parametrize("condition", ["m.content is none", "not m.content"])
@pytest.mark.parametrize("content", [None, "", "So"])
def test_calls_that_a_template_writes_in_place_of_content(processor: InputProcessor, condition, content) -> None:
    """As DeepSeek's templates do: content comes before the calls then."""
    template = (
        "{% for m in messages %}{% if m.role == 'assistant' and " + condition + " %}" + CALLED + "{% else %}"
        "<{{ m.role }}>{{ m.content }}{% endif %}{% endfor %}"
    )
    call = {"id": "c1", "type": "function", "function": {"name": "now", "arguments": '{"z": 1}'}}
    conversation = [
        {"role": "user", "content": "go"},
        {"role": "assistant", "content": content, "tool_calls": [call]},
        {"role": "tool", "content": "noon", "tool_call_id": "c1"},
    ]
    text = processor.chat_prompt(conversation, {"chat_template": template, "add_generation_prompt": False})["prompt"]
    before = "<assistant>So" if content else ""
    assert text == f'<user>go{before}<call>now{{"z": 1}}</call><tool>noon'


@pytest.mark.parametrize("left_out", ["calls", "results"])
def test_calls_and_results_that_a_template_leaves_out(processor: InputProcessor, left_out: str) -> None:
    """The function's name is in the prompt all the same: in the list of tools."""
    template = (
        "{% for t in tools %}{{ t.function.name }}{% endfor %}{% for m in messages %}"
        + ("{% if m.role != 'tool' %}{{ m.content }}{% for c in m.tool_calls or [] %}{{ c.function.name }}{% endfor %}"
           "{% endif %}" if left_out == "results" else "{{ m.content }}")
        + "{% endfor %}"
    )  # fmt: skip
    call = {"id": "c1", "type": "function", "function": {"name": "now", "arguments": "{}"}}
    conversation = [
        {"role": "user", "content": "go"},
        {"role": "assistant", "content": "now", "tool_calls": [call]},
        {"role": "tool", "content": "go", "tool_call_id": "c1"},
    ]
    tools = [{"type": "function", "function": {"name": "now"}}]
    with pytest.raises(InvalidRequestError, match="leaves tool calls or their results out") as caught:
        processor.chat_prompt(conversation, {"chat_template": template, "tools": tools})
    assert caught.value.param == ("messages[1].tool_calls" if left_out == "calls" else "messages[2]")


@pytest.mark.parametrize("template", REAL.values(), ids=REAL)
def test_templates_in_use_raise_no_false_alarm(processor: InputProcessor, template: str) -> None:
    system = "  Answer in <b>two</b> lines: “é”.\n\tNo \"quotes\" & 'such'. /no_think\n"
    first = "\n Is <think>this</think> fine?\n\n```\n\tif a < b and b > 'c':\n```  "
    turns = [("system", system), ("user", first), ("assistant", "<think>hm</think>\n\nYes."), ("user", first)]
    for messages in (turns, turns[1:], [("system", "/no_think"), ("user", "yes")], [("user", " \n")]):
        text = prompt(processor, template, *messages, add_generation_prompt=False)
        assert messages[-1][1].strip().partition(" ")[0] in text


@pytest.mark.parametrize(
    ("template", "index"),
    [
        ("{% for m in messages if m.role != 'system' %}{{ m.role }}: {{ m.content }}\n{% endfor %}", 0),
        ("{{ messages[0].content }}{{ messages[-1].content }}", 1),
        ("{% for m in messages %}{{ m.role }}: {{ m.content[:9] }}\n{% endfor %}", 0),
        ("{% for m in messages %}{% for p in m.content %}{{ p.words }}{% endfor %}{% endfor %}", 0),
        (DEEPSEEK_R1, 4),
    ],
    ids=["no system", "first and last", "cut", "another field", "one system text alone"],
)
def test_text_that_is_not_in_the_prompt_is_an_error(processor: InputProcessor, template: str, index: int) -> None:
    turns = [("system", "Use short words."), ("user", "yes"), ("assistant", "ok"), ("user", "yes"), ("system", "Stop.")]
    if index == 4:
        turns[0], turns[4], index = turns[4], turns[0], 0
    with pytest.raises(InvalidRequestError, match=rf"messages\[{index}\]") as caught:
        prompt(processor, template, *turns)
    assert caught.value.param == f"messages[{index}].content"


def test_tools_that_the_template_leaves_out_are_an_error(processor: InputProcessor) -> None:
    tools = [{"type": "function", "function": {"name": name}} for name in ("one", "two")]
    first = "{{ tools[0].function.name }}" + STRING
    with pytest.raises(InvalidRequestError, match="writes no tools") as caught:
        prompt(processor, first, ("user", "hi"), tools=tools)
    assert caught.value.param == "tools[1]"
    assert prompt(processor, first, ("user", "hi"), tools=tools[:1]).startswith("one")
    assert prompt(processor, STRING, ("user", "hi"), tools=[]) == prompt(processor, STRING, ("user", "hi"))


@pytest.mark.parametrize("last", ["user", "assistant"])
@pytest.mark.parametrize(
    "listed", ["{{ t.name | replace('a', 'A') }}", "{{ t.name | e }}", "{{ t.name.split('&') }}", "{{ t.description }}"]
)
def test_tools_that_the_template_writes_otherwise_are_no_error(processor, listed, last) -> None:
    tools = [{"type": "function", "function": {"name": "a&b", "description": "Adds"}}]
    template = "{% for tool in tools %}{% set t = tool.function %}" + listed + "{% endfor %}" + STRING
    options = {"add_generation_prompt": False, "continue_final_message": True} if last == "assistant" else {}
    messages = [("user", "hi"), ("assistant", "So")] if options else [("user", "hi")]
    assert prompt(processor, template, *messages, tools=tools, **options)


@pytest.mark.parametrize("name", ["trims", "string", "parts", "Llama 3", "Qwen 3"])
@pytest.mark.parametrize("text", ["", "So", "So, \n", " \n", "  a"])
def test_a_continued_message_keeps_the_templates_prefix(processor: InputProcessor, name: str, text: str) -> None:
    template = REAL[name]
    closed = prompt(processor, template, ("user", "hi"), ("assistant", "MARK"), add_generation_prompt=False)
    options = {"add_generation_prompt": False, "continue_final_message": True}
    trims = name in ("trims", "Llama 3")
    expected = closed[: closed.index("MARK")] + (text.strip() if trims else text)
    for content in (text, as_parts(text), None) if not text else (text, as_parts(text)):
        assert prompt(processor, template, ("user", "hi"), ("assistant", content), **options) == expected


def test_message_that_the_template_drops_cannot_be_continued(processor: InputProcessor) -> None:
    options = {"add_generation_prompt": False, "continue_final_message": True}
    template = "{% for m in messages if m.role == 'user' %}{{ m.content }}{% endfor %}"
    with pytest.raises(InvalidRequestError, match="cannot be continued") as caught:
        prompt(processor, template, ("user", "hi"), ("assistant", "So"), **options)
    assert caught.value.param == "messages[1].content"


class Rendered(str):
    """Text of a prompt that counts the searches for something that is not in it."""

    num_misses = 0

    def casefold(self) -> "Rendered":
        return self

    def find(self, *args: Any) -> int:
        place = super().find(*args)
        self.num_misses += place < 0
        return place


@pytest.mark.parametrize("alter", [lambda text: json.dumps(text)[1:-1], lambda text: " ".join(text.split())])
def test_many_altered_texts_need_few_searches(alter: Any) -> None:
    texts = [f"number{i}\n\ttext" for i in range(100)]
    messages = [{"role": "user", "content": [{"type": "text", "text": text}]} for text in texts]
    rendered = Rendered("".join(f"<u>{alter(text)}" for text in texts))
    check_texts_arrive(messages, rendered)
    assert rendered.num_misses < 5


ENDLESS = "{% for i in range(90000) %}{% for j in range(90000) %}{% endfor %}{% endfor %}"


@pytest.mark.parametrize("template", [ENDLESS + STRING, STRING + ENDLESS])
def test_a_template_that_does_not_end_is_stopped(tokenizer, monkeypatch, template):
    monkeypatch.setattr(chat_template, "TEMPLATE_SECONDS", 0.3)
    messages = [{"role": "user", "content": "hello"}]
    with pytest.raises(InvalidRequestError, match=r"takes longer than 0\.3 s") as raised:
        chat_template.render_messages(tokenizer, messages, {"chat_template": template})
    assert raised.value.param == "messages"
    assert "hello" in chat_template.render_messages(tokenizer, messages, {"chat_template": STRING})
