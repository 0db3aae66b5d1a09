"""The default base against Hugging Face `transformers` reading the same GGUF file, in float32 (extra `parity`)."""

import os
from types import SimpleNamespace

import numpy as np
import pytest

REASON = "the reference implementation needs the extra `parity`: pip install -e .[parity]"
torch = pytest.importorskip("torch", reason=REASON)
transformers = pytest.importorskip("transformers", reason=REASON)

import jax  # noqa: E402
import jax.numpy as jnp  # noqa: E402
from tokenizers.pre_tokenizers import Digits, Sequence  # noqa: E402

from postrl.contracts import Message  # noqa: E402
from postrl.policy.attention import packed  # noqa: E402
from postrl.policy.base import smollm2_135m  # noqa: E402
from postrl.policy.gguf_file import smollm2_path  # noqa: E402
from postrl.policy.model import forward, logits  # noqa: E402
from postrl.rollout.engine import Engine, EngineConfig  # noqa: E402

NUM_CHAT_TOKENS = 200
NUM_GREEDY_TOKENS = 64

CHAT = (
    Message("system", "You answer with one shell command. The files lie in the current directory."),
    Message(
        "user", "How many lines of notes.txt contain the word 'apple'? There are 3 files: a.csv, notes.txt, run.sh"
    ),
    Message("assistant", "grep -c apple notes.txt"),
    Message("user", "It printed 12. Which of the lines is the longest, and what is its length in characters?"),
)


@pytest.fixture(scope="module")
def base():
    return smollm2_135m()


@pytest.fixture(scope="module")
def reference():
    """`transformers`' model and tokenizer of the same file, from the disk alone."""
    path = smollm2_path()
    os.environ["HF_HUB_OFFLINE"] = "1"
    model = transformers.AutoModelForCausalLM.from_pretrained(
        path.parent, gguf_file=path.name, dtype=torch.float32
    ).eval()
    tokenizer = transformers.AutoTokenizer.from_pretrained(path.parent, gguf_file=path.name)
    # It drops what the file says of the pre-tokenizer (`smollm`: every digit on its own, before the GPT-2 split), so it
    # splits "\n\n1" otherwise than the model was trained on. Put back, it must agree with ours on everything.
    backend = tokenizer.backend_tokenizer
    backend.pre_tokenizer = Sequence([Digits(individual_digits=True), backend.pre_tokenizer])
    return SimpleNamespace(model=model, tokenizer=tokenizer)


@pytest.fixture(scope="module")
def chat_T(base):
    """int32 [200]: a conversation of several turns, cut to length."""
    token_T = base.chat.opening(CHAT)
    reply_T = base.chat.encode_reply(
        "awk 'length($0) > n { n = length($0); line = $0 } END { print n, line }' notes.txt"
    )
    token_T = np.concatenate([token_T, reply_T, base.chat.continuation(True, "51 a green apple fell off the old tree")])
    token_T = np.concatenate([token_T, base.chat.encode_reply("The longest line has 51 characters. " * 8)])
    assert len(token_T) >= NUM_CHAT_TOKENS
    return token_T[:NUM_CHAT_TOKENS]


def test_logits_agree_at_every_position(base, reference, chat_T):
    position_T = jnp.arange(NUM_CHAT_TOKENS, dtype=jnp.int32)
    one_segment_T = jnp.ones(NUM_CHAT_TOKENS, jnp.int32)

    @jax.jit
    def logits_of(params, token_T):
        attend = packed(one_segment_T, one_segment_T - 2)
        h_TD, _ = forward(base.model, params, None, 0.0, token_T, position_T, attend)
        return logits(params, h_TD)

    ours_TV = np.asarray(logits_of(base.params, chat_T))
    with torch.inference_mode():
        theirs_TV = reference.model(torch.tensor(chat_T, dtype=torch.long)[None]).logits[0].numpy()
    assert ours_TV.dtype == theirs_TV.dtype == np.float32
    assert ours_TV.shape == theirs_TV.shape == (NUM_CHAT_TOKENS, base.model.vocab_size)
    worst_T = np.abs(ours_TV - theirs_TV).max(axis=1)
    assert worst_T.max() <= 1e-3, f"position {worst_T.argmax()} differs by {worst_T.max():.1e}"


def test_greedy_tokens_are_identical(base, reference):
    prompt_T = base.chat.opening((Message("user", "Tell me a long story about a lighthouse keeper and a storm."),))
    config = EngineConfig(max_requests=8, max_context=192, num_pages=32, max_step_tokens=64)
    # End tokens are disabled on both sides, so that there are 64 tokens to compare whatever the story.
    with Engine(base.model, base.params, None, 0.0, eos_id=-1, config=config) as engine:
        future = engine.submit(prompt_T, seed=0, temperature=0.0, max_new_tokens=NUM_GREEDY_TOKENS)
        ours_T = future.result().token_T
    reference.model.generation_config.eos_token_id = None
    with torch.inference_mode():
        input_BT = torch.tensor(prompt_T, dtype=torch.long)[None]
        output_BT = reference.model.generate(
            input_BT,
            attention_mask=torch.ones_like(input_BT),
            do_sample=False,
            max_new_tokens=NUM_GREEDY_TOKENS,
            pad_token_id=0,
        )
    theirs_T = output_BT[0, len(prompt_T) :].numpy()
    assert len(ours_T) == NUM_GREEDY_TOKENS
    np.testing.assert_array_equal(ours_T, theirs_T)


TEXTS = (
    "Plain words, punctuation; and a (nested [bracket])! Isn't it?",
    "revenue 1234567.89 (in thousands), 2023-10-05, -42 and 3e-5",
    "def f(x):\n    return x + 1\n\n\nclass A:\n\tpass\n",
    "  two leading spaces,   three inside, trailing  ",
    "naïve café, 东京 2024, emoji 🙂, combining e\u0301, tab\tand\r\nCRLF",
    "\n\n1. first\n\n2. second  10   200",
    "$ awk -F, '$3 > 10 { n++ } END { print n }' a.csv | sort -rn | head -5",
    "",
)


def test_tokenizers_agree(base, reference):
    theirs = reference.tokenizer
    for text in TEXTS:
        assert base.chat.tokenizer.encode(text, add_special_tokens=False).ids == theirs(text)["input_ids"], repr(text)
    messages = [{"role": m.role, "content": m.content} for m in CHAT]
    rendered = theirs.apply_chat_template(messages, add_generation_prompt=True, tokenize=True, return_dict=True)
    assert base.chat.opening(CHAT).tolist() == list(rendered["input_ids"])


def test_special_tokens_agree(base, reference):
    theirs = reference.tokenizer
    assert (base.chat.eos_id, base.chat.eos_token) == (theirs.eos_token_id, theirs.eos_token)
    assert base.chat.tokenizer.get_vocab_size() == len(theirs) == base.model.vocab_size
    added = base.chat.tokenizer.get_added_tokens_decoder().values()
    assert set(theirs.all_special_tokens) <= {token.content for token in added if token.special}
