"""This namespace makes tiny models with full mechanics, what is fed to them, and what they must
equal.

`tiny.lvlm` and the rest of this namespace need JAX alone; `tests.tiny.hf`, `qwen_vl` and `tiles`
are transformers' own models and need torch.
"""

from tests.tiny.checkpoints import (
    CHARACTERS,
    CONFIG,
    E2B,
    PAIR_CONTEXT,
    SPECIAL,
    chat_tokenizer,
    gemma4,
    image_processor,
    rewritten,
    save,
    save_head,
    save_pair,
    tokenizer,
)
from tests.tiny.loops import (
    CAPTION,
    NEWLINE,
    PATCHES,
    QUICK,
    blind,
    full_pass,
    outputs,
    params_of,
    prompts,
    run_plain,
    run_speculative,
    sampling,
    speculator,
    stack,
    take,
    view_rows,
    weighted,
)
from tests.tiny.models import (
    CONTEXT,
    EOS,
    VOCABULARY,
    eagle_params,
    gemma_eagle,
    kv_head,
    lvlm,
    narrow,
    noisy,
    random_params,
    resized,
    text_only,
)
from tests.tiny.refusals import one_line
from tests.tiny.requests import (
    ENGINE,
    Talk,
    check_session,
    head_of,
    loaded,
    page,
    request_of,
    run_live,
    split,
    tokens,
)
from tests.tiny.tiers import rarer
