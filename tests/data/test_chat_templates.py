"""Chat templates render first turns as they are, and follow-ups continue the answer's own ids."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from tokenizers import AddedToken
from tokenizers.processors import TemplateProcessing

from jaxspec.checkpoints.processors import load_tokenizer
from jaxspec.engine.requests import Request, encode
from jaxspec.errors import InputError
from jaxspec.prompts.chat_templates import chat_templates
from jaxspec.prompts.encoder import PromptEncoder
from jaxspec.prompts.messages import Message, dialogue, user_message
from jaxspec.serve.bodies import chat
from jaxspec.serve.messages import Limits
from tests import tiny
from tests.hub.configs import GEMMA4

MINI = Path(__file__).parents[2] / "jaxspec_demo" / "mini" / "target"
CHATML = (
    "{% if messages[0]['role'] != 'system' %}{{ '<|im_start|>system\\nBe kind.<|im_end|>\\n' }}"
    "{% endif %}"
    "{% for m in messages %}{{ '<|im_start|>' + m['role'] + '\\n' + m['content']"
    " + '<|im_end|>\\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)
LLAMA2 = (
    "{% for m in messages %}{% if (m['role'] == 'user') != (loop.index0 % 2 == 0) %}"
    "{{ raise_exception('Roles must alternate') }}{% endif %}{% if m['role'] == 'user' %}"
    "{{ bos_token + '[INST] ' + m['content'].strip() + ' [/INST]' }}{% else %}"
    "{{ ' ' + m['content'].strip() + ' ' + eos_token }}{% endif %}{% endfor %}"
)
LLAMA3 = (
    "{% for m in messages %}{% set content = '<|start_header_id|>' + m['role'] + "
    "'<|end_header_id|>\\n\\n' + m['content'] | trim + '<|eot_id|>' %}"
    "{{ bos_token + content if loop.first else content }}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|start_header_id|>assistant<|end_header_id|>\\n\\n' }}"
    "{% endif %}"
)
PARTS = (
    "{% for m in messages %}{{ m['role'].upper() + ': ' }}"
    "{% for part in m['content'] | selectattr('type', 'equalto', 'text') %}"
    "{{ part['text'] + ' ' }}{% endfor %}"
    "{% endfor %}{% if add_generation_prompt %}{{ 'ASSISTANT:' }}{% endif %}"
)

# name: template, what closes an answer, first turn, what follows a closed answer, what follows an
# open one
FORMATS: dict[str, tuple[str, str, str, str, str]] = {
    "ChatML": (
        CHATML,
        "<|im_end|>",
        "<|im_start|>system\nBe kind.<|im_end|>\n<|im_start|>user\nWho?<|im_end|>\n"
        "<|im_start|>assistant\n",
        "\n<|im_start|>user\nWhy?<|im_end|>\n<|im_start|>assistant\n",
        "<|im_end|>\n<|im_start|>user\nWhy?<|im_end|>\n<|im_start|>assistant\n",
    ),
    "Llama 2": (
        LLAMA2,
        "</s>",
        "<s>[INST] Who? [/INST]",
        "<s>[INST] Why? [/INST]",
        " </s><s>[INST] Why? [/INST]",
    ),
    "Llama 3": (
        LLAMA3,
        "<|eot_id|>",
        "<s><|start_header_id|>user<|end_header_id|>\n\nWho?<|eot_id|>"
        "<|start_header_id|>assistant<|end_header_id|>\n\n",
        "<|start_header_id|>user<|end_header_id|>\n\nWhy?<|eot_id|>"
        "<|start_header_id|>assistant<|end_header_id|>\n\n",
        "<|eot_id|><|start_header_id|>user<|end_header_id|>\n\nWhy?<|eot_id|>"
        "<|start_header_id|>assistant<|end_header_id|>\n\n",
    ),
    "lists of parts": (
        PARTS,
        "</s>",
        "USER: Who? ASSISTANT:",
        " USER: Why? ASSISTANT:",
        " USER: Why? ASSISTANT:",
    ),
}


def tokenizer(template: str, eos: str = "</s>") -> Any:
    words = tiny.tokenizer()
    marks = ("<|im_start|>", "<|im_end|>", "<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>")
    words.add_tokens([AddedToken(mark, special=True, normalized=False) for mark in marks])
    words.eos_token, words.chat_template = eos, template
    return words


@pytest.mark.parametrize("name", FORMATS)
def test_turns(name):
    template, closing, first, after_closed, after_open = FORMATS[name]
    encoder = PromptEncoder(tokenizer(template, closing))
    prompt = encoder.prompt("Who?")
    assert encoder.tokenizer.decode(prompt.tokens) == first

    answer = encoder.tokenizer.encode("Me.", add_special_tokens=False)
    for ids, following in ((answer, after_open), ([*answer, encoder.eos], after_closed)):
        second = encoder.follow_up(prompt, ids, "Why?").tokens.tolist()
        told = [*prompt.tokens.tolist(), *ids]
        assert second[: len(told)] == told
        assert encoder.tokenizer.decode(second[len(told) :]) == following
        third = encoder.follow_up(
            encoder.follow_up(prompt, ids, "Why?"), ids, "Why?"
        ).tokens.tolist()
        assert third == [*second, *ids, *second[len(told) :]]


@pytest.mark.parametrize("name", FORMATS)
def test_training_dialogues_are_what_decoding_will_see(name):
    encoder = PromptEncoder(tokenizer(*FORMATS[name][:2]))
    ((tokens, mask),) = encoder.dialogues([dialogue([("Who?", "Me."), ("Why?", "No.")])])
    told = [*encoder.tokenizer.encode("Me.", add_special_tokens=False), encoder.eos]
    second = encoder.follow_up(encoder.prompt("Who?"), told, "Why?")
    assert tokens[: len(second.tokens)].tolist() == second.tokens.tolist()
    assert tokens[mask].tolist()[: len(told)] == told
    assert mask.sum() == 2 * len(told)


@pytest.mark.parametrize("sees", [False, True])
@pytest.mark.parametrize("name", [*FORMATS, "none"])
def test_templates_for_transformers(name, sees):
    """With the exported templates, `apply_chat_template` gives the ids of this library's prompts,
    BOS among them.
    """
    words = tokenizer(*FORMATS[name][:2]) if name in FORMATS else tiny.tokenizer()
    if name != "ChatML":
        words.backend_tokenizer.post_processor = TemplateProcessing(
            single="<s> $A", special_tokens=[("<s>", 1)]
        )
    encoder = PromptEncoder(words, tiny.SPECIAL.index("<image>") if sees else None)
    prompt = encoder.prompt("Who?").tokens.tolist()
    template = chat_templates(encoder)["default"]
    parts: list[Any] = ["Who?", [{"type": "text", "text": "Who?"}]]
    content = parts[name == "lists of parts"]
    said = [{"role": "user", "content": content}]
    text = words.apply_chat_template(
        said, chat_template=template, add_generation_prompt=True, tokenize=False
    )
    if sees:  # as transformers' processors do it
        assert words.encode(text, add_special_tokens=not text.startswith("<s>")) == prompt
    else:
        assert words.encode(text, add_special_tokens=False) == prompt


@pytest.mark.parametrize("words", [tiny.tokenizer(), load_tokenizer(MINI)], ids=["tiny", "mini"])
def test_what_is_written_without_a_template_is_one_for_transformers(words):
    """The template written for a model without one renders whole conversations, with images and
    with contents as text or parts, as this library does. The mini tokeniser puts a space in front
    of a text, but not behind the end of an answer.
    """
    encoder = PromptEncoder(words, words.convert_tokens_to_ids("<image>"))
    turns = [("<image>\nWho?", "Me."), ("Why?", "No.")]
    ((tokens, _),) = encoder.dialogues([dialogue(turns, [None], "Be kind.")])
    template = chat_templates(encoder)["default"]
    for image in ([{"type": "image"}, {"type": "text", "text": "Who?"}], turns[0][0]):
        contents = [image, "Me.", [{"type": "text", "text": "Why?"}], "No."]
        said = [
            {"role": role, "content": part}
            for role, part in zip(("user", "assistant") * 2, contents)
        ]
        said = [{"role": "system", "content": "Be kind."}, *said]
        text = words.apply_chat_template(said, chat_template=template, tokenize=False)
        assert [words.bos_token_id, *encoder.ids(text)] == tokens.tolist()


def test_one_bos_at_most():
    """A tokeniser that puts BOS in front of texts does so before a template that writes none, and
    only once.
    """
    for template in (PARTS, LLAMA3):
        words = tokenizer(template)
        words.backend_tokenizer.post_processor = TemplateProcessing(
            single="<s> $A", special_tokens=[("<s>", 1)]
        )
        tokens = PromptEncoder(words).prompt("Who?").tokens.tolist()
        assert tokens[0] == words.bos_token_id
        assert tokens.count(words.bos_token_id) == 1


@pytest.mark.parametrize(
    ("template", "reason"),
    [
        ("{{ raise_exception('No system\nof this kind') }}", "No system"),
        ("USER ASSISTANT:", "it leaves out what was said"),
    ],
)
def test_templates_that_do_not_work(template, reason):
    assert reason in tiny.one_line(lambda: PromptEncoder(tokenizer(template)).prompt("Who?"))


@pytest.mark.parametrize(
    ("decoder", "mark", "form"),
    [
        ("llama", "", "USER: Who? ASSISTANT:"),
        ("llama", "<|start_header_id|>", None),
        ("llama", "<|im_start|>", None),
        ("qwen2", "<|im_start|>", None),
        ("qwen3", "", None),
        ("mistral", "", None),
        ("opt", "", None),
    ],
)
def test_only_vicunas_family_is_asked_in_vicunas_form(decoder, mark, form):
    words = tiny.tokenizer()
    words.add_tokens([AddedToken(mark, special=True, normalized=False)] if mark else [])
    encoder = PromptEncoder(words, decoder=decoder)
    said = [("Who?", "Me."), ("Why?", "No.")]
    who = [user_message("Who?")]
    asks = (lambda: encoder.opening(who), lambda: encoder.dialogues([dialogue(said)]))
    if form:
        assert encoder.opening(who) == form
        assert chat_templates(encoder)
        return
    for ask in asks:
        with pytest.raises(
            InputError,
            match=f"no chat template, and this '{decoder}' is not asked in Vicuna's form",
        ):
            ask()
    assert chat_templates(encoder) == {}
    assert encoder.completion("Who?").tokens.tolist()[1:] == encoder.ids("Who?")  # base models
    ((tokens, _),) = encoder.dialogues([dialogue([("", "It rains.")])])  # text without roles
    assert encoder.text(tokens) == "It rains."


def test_contents_are_not_printed_as_python_does():
    """A template that prints contents as they are gets text, whatever else it writes."""
    template = (
        "You may see <image>. {% for m in messages %}"
        "{{ m['role'] + ': ' }}{{ m['content'] }}{% endfor %}"
    )
    encoder = PromptEncoder(tokenizer(template), tiny.SPECIAL.index("<image>"))
    assert (
        encoder.opening([user_message("Who?", [None])])
        == "You may see <image>. user: <image>\nWho?"
    )


@pytest.mark.parametrize(
    ("template", "reason"),
    [
        ("{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}", "maximum recursion"),
        ("{{ range(99_999_999) | list }}", "Range too big"),
        ("{{ messages[0].update(role='tool') }}", "unsafe"),
        ("{{ ''.__class__.__mro__[1].__subclasses__() }}", "unsafe"),
        ("{% include '/etc/passwd' %}", "no loader"),
    ],
)
def test_templates_run_in_a_sandbox(template, reason):
    said = tiny.one_line(lambda: PromptEncoder(tokenizer(template)).prompt("Who?"))
    assert "cannot render messages of user" in said
    assert reason in said


REASONED = CHATML.replace("m['content']", "m['content'].split('</think>')[-1]")
NO_SYSTEM = "{% if messages[0]['role'] == 'system' %}{{ raise_exception('No system') }}{% endif %}"
CONVERSATION = [
    Message("system", ("Be kind.",)),
    *dialogue([("Who?", "<think>Hm.</think>Me."), ("Why?", "")])[:-1],
]


@pytest.mark.parametrize(
    ("template", "before", "after"),
    [
        (CHATML, "system\nBe kind.<|im_end|>\n<|im_start|>user\nWho?", "<think>Hm.</think>Me."),
        (REASONED, "system\nBe kind.<|im_end|>\n<|im_start|>user\nWho?", "Me."),
        (NO_SYSTEM + LLAMA2, "[INST] Be kind.\n\nWho?", " <think>Hm.</think>Me."),
        (PARTS, "SYSTEM: Be kind. USER: Who?", " <think>Hm.</think>Me."),
        (None, "Be kind. USER: Who? ASSISTANT:", "<think>Hm.</think>Me."),
    ],
)
def test_a_system_prompt_and_reasoning_are_where_the_template_has_them(template, before, after):
    """A system prompt that a template refuses precedes the first question; a template may leave out
    the reasoning of earlier answers.
    """
    encoder = PromptEncoder(tokenizer(template))
    encoder = replace(encoder, tokenizer=tiny.tokenizer()) if template is None else encoder
    text = encoder.tokenizer.decode(encoder.prompt(CONVERSATION).tokens)
    head, _, tail = text.partition(before)
    assert head in ("", "<s>", "<|im_start|>")
    assert after in tail
    assert "Why?" in tail
    assert ("<think>" in text) == (template != REASONED)
    asked = replace(encoder, system="Be kind.").prompt(CONVERSATION[1:])
    assert asked.tokens.tolist() == encoder.prompt(CONVERSATION).tokens.tolist()


@pytest.mark.parametrize("limits", [Limits("m"), Limits("m", thinking=True)], ids=["", "server"])
def test_thinking_is_what_the_template_makes_of_it(limits: Limits) -> None:
    """`thinking` of a request or of a body chooses the template's switch; a body's own counts
    before the server's.
    """
    words = tokenizer(GEMMA4)
    words.add_special_tokens({"eos_token": "</s>"})
    encoder, question = PromptEncoder(words), [{"role": "user", "content": "Who?"}]

    def text(request: Request) -> str:
        (read,) = encode(encoder, [request])
        return words.decode(read.prompt.tokens)

    off, on, neither = (text(Request("Who?", thinking=each)) for each in (False, True, None))
    assert off == neither
    assert off.endswith("<|turn>model\n<|channel>thought\n<channel|>")
    assert "<|turn>system\n<|think|><turn|>\n" in on
    assert on.endswith("<|turn>model\n")
    for switches, expected in (
        ({}, on if limits.thinking else off),
        ({"enable_thinking": True}, on),
        ({"enable_thinking": False}, off),
    ):
        body = {"messages": question, "chat_template_kwargs": switches}
        assert text(chat(body, encoder, limits).requests[0]) == expected
    later = replace(encoder, thinking=True).follow_up(encoder.prompt("Who?"), (), "Why?")
    assert words.decode(later.tokens).endswith("Why?<turn|>\n<|turn>model\n")


def test_thinking_without_a_switch_is_refused() -> None:
    with pytest.raises(InputError, match="thinking: the chat template has no switch for it"):
        encode(PromptEncoder(tokenizer(CHATML)), [Request("Who?", thinking=False)])
    with pytest.raises(InputError, match="thinking: 'on'; give true or false"):
        Request("Who?", thinking="on")  # type: ignore[arg-type]
