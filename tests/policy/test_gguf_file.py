"""The GGUF reader on a tiny file written by the package `gguf`, and the order of rotary rows against its definition."""

import dataclasses

import numpy as np
import pytest

from postrl.policy.gguf_file import _half_split_rows, chat_format, load_gguf
from postrl.policy.model import ModelConfig
from tests.policy.tiny import CHATML, rotated

gguf = pytest.importorskip("gguf")

SMALL = ModelConfig(
    num_layers=2,
    model_dim=8,
    num_heads=4,
    num_kv_heads=2,
    head_dim=4,
    ffw_dim=12,
    vocab_size=259,
    rope_theta=500.0,
    norm_eps=1e-6,
)
SHAPES = {
    "attn_norm": (8,),
    "attn_q": (16, 8),
    "attn_k": (8, 8),
    "attn_v": (8, 8),
    "attn_output": (8, 16),
    "ffn_norm": (8,),
    "ffn_gate": (12, 8),
    "ffn_up": (12, 8),
    "ffn_down": (8, 12),
}


def test_row_order_by_hand():
    """Two heads of 6 rows: rows 2i come first, rows 2i + 1 behind them."""
    rows = np.arange(12)[:, None] * np.ones((1, 3))
    assert _half_split_rows(rows, 6)[:, 0].tolist() == [0, 2, 4, 1, 3, 5, 6, 8, 10, 7, 9, 11]


def test_row_order_keeps_every_attention_score():
    """Scores of neighbouring pairs on the file's rows equal scores of half-split pairs on ours."""
    rng = np.random.default_rng(0)
    wq, wk = rng.normal(size=(2, 8, 5))
    x, y = rng.normal(size=(2, 5))

    def neighbours(v, position):
        turn = np.exp(1j * position * 50.0 ** (-np.arange(0, 8, 2) / 8))
        points = (v[0::2] + 1j * v[1::2]) * turn
        return np.stack([points.real, points.imag], axis=1).reshape(-1)

    ours = rotated(_half_split_rows(wq, 8) @ x, 7, 50.0) @ rotated(_half_split_rows(wk, 8) @ y, 3, 50.0)
    np.testing.assert_allclose(ours, neighbours(wq @ x, 7) @ neighbours(wk @ y, 3), rtol=1e-12)


def write_file(path, *, architecture="llama", extra=(), without=(), model=SMALL):
    """A tiny model file; returns the arrays in it."""
    writer = gguf.GGUFWriter(path, architecture)
    writer.add_block_count(model.num_layers)
    writer.add_embedding_length(model.model_dim)
    writer.add_head_count(model.num_heads)
    writer.add_head_count_kv(model.num_kv_heads)
    writer.add_rope_dimension_count(model.head_dim)
    writer.add_feed_forward_length(model.ffw_dim)
    writer.add_vocab_size(model.vocab_size)
    writer.add_rope_freq_base(model.rope_theta)
    writer.add_layer_norm_rms_eps(model.norm_eps)
    for name, value in tokenizer_meta().items():
        if isinstance(value, str):
            writer.add_string(name, value)
        elif isinstance(value, list):
            writer.add_array(name, value)
        else:
            writer.add_uint32(name, value)
    rng = np.random.default_rng(0)
    names = {"token_embd.weight": (259, 8), "output_norm.weight": (8,)}
    names |= {f"blk.{i}.{name}.weight": shape for i in range(2) for name, shape in SHAPES.items()}
    names |= {name: (8,) for name in extra}
    arrays = {name: rng.normal(size=shape).astype(np.float32) for name, shape in names.items() if name not in without}
    for name, array in arrays.items():
        writer.add_tensor(name, array)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return arrays


def tokenizer_meta():
    from tokenizers import pre_tokenizers

    tokens = [*sorted(pre_tokenizers.ByteLevel.alphabet()), "ab", "<|im_start|>", "<|im_end|>"]
    return {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": "smollm",
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.token_type": [1] * 257 + [3, 3],
        "tokenizer.ggml.merges": ["a b"],
        "tokenizer.ggml.bos_token_id": 257,
        "tokenizer.ggml.eos_token_id": 258,
        "tokenizer.chat_template": CHATML,
    }


def test_every_array_and_number_comes_from_the_file(tmp_path):
    arrays = write_file(tmp_path / "m.gguf")
    config, params, chat = load_gguf(tmp_path / "m.gguf")
    for field in dataclasses.fields(SMALL):
        np.testing.assert_allclose(getattr(config, field.name), getattr(SMALL, field.name), rtol=1e-6)
    np.testing.assert_array_equal(params.embed, arrays["token_embd.weight"])
    np.testing.assert_array_equal(params.final_norm, arrays["output_norm.weight"])
    ours = dict(zip(SHAPES, ("attn_norm", "wq", "wk", "wv", "wo", "ffw_norm", "w_gate", "w_up", "w_down"), strict=True))
    for theirs, name in ours.items():
        for layer in range(2):
            wanted = arrays[f"blk.{layer}.{theirs}.weight"]
            if name in ("wq", "wk"):
                wanted = wanted.reshape(-1, 2, 2, 8).swapaxes(1, 2).reshape(wanted.shape)
            np.testing.assert_array_equal(getattr(params.layers, name)[layer], wanted, err_msg=name)
    assert (chat.bos_token, chat.eos_token, chat.eos_id, chat.template) == ("<|im_start|>", "<|im_end|>", 258, CHATML)
    assert [chat.tokenizer.id_to_token(i) for i in chat.encode_reply("abba12")] == [
        "ab",
        "b",
        "a",
        "1",
        "2",
        "<|im_end|>",
    ]


def test_other_files_are_refused(tmp_path):
    with pytest.raises(ValueError, match="no GGUF file at"):
        load_gguf(tmp_path / "absent.gguf")
    write_file(tmp_path / "qwen.gguf", architecture="qwen2")
    with pytest.raises(ValueError, match="architecture 'qwen2'; supported: 'llama'"):
        load_gguf(tmp_path / "qwen.gguf")
    write_file(tmp_path / "head.gguf", extra=("output.weight",))
    with pytest.raises(ValueError, match="only tied embeddings"):
        load_gguf(tmp_path / "head.gguf")
    write_file(tmp_path / "bias.gguf", extra=("blk.0.attn_q.bias",))
    with pytest.raises(ValueError, match=r"no place for: \['blk.0.attn_q.bias'\]"):
        load_gguf(tmp_path / "bias.gguf")
    write_file(tmp_path / "torn.gguf", without=("blk.1.ffn_up.weight",))
    with pytest.raises(ValueError, match=r"lacks the tensor 'blk\.1\.ffn_up\.weight'"):
        load_gguf(tmp_path / "torn.gguf")


def test_other_tokenizers_are_refused():
    with pytest.raises(ValueError, match=r"\('gpt2', 'qwen2'\) is not supported"):
        chat_format({**tokenizer_meta(), "tokenizer.ggml.pre": "qwen2"})
