"""Checkpoints: written and read back, shards, quantised experts, and files that do not fit."""

import json
import sys

import decoder_models as models
import decoder_server as server
import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
import transformers
from safetensors.numpy import load_file, save_file
from transformers.integrations.mxfp4 import convert_moe_packed_tensors

from swa_jax.models import forward, load_checkpoint, random_params, save_checkpoint
from swa_jax.models.decoder.mxfp4 import dequantise

CONFIGS = {"gemma": server.GEMMA, "gpt_oss": server.GPT_OSS}
TOKENS = np.random.default_rng(1).integers(0, 97, (2, 12))


@pytest.fixture(params=CONFIGS)
def saved(request, tmp_path):
    """A family's configuration and parameters, and a directory they were saved in."""
    config = CONFIGS[request.param]
    params = random_params(config, jax.random.key(0))
    save_checkpoint(tmp_path, config, params)
    return config, params, tmp_path


def same(first, second):
    return jax.tree.all(
        jax.tree.map(lambda a, b: a.dtype == b.dtype and (a == b).all(), *[first, second])
    )


def change_tensors(folder, change):
    path = folder / "model.safetensors"
    tensors = load_file(path)
    change(tensors)
    save_file(tensors, path, metadata={"format": "pt"})


def change_config(folder, **changes):
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


def test_saving_and_loading_gives_the_same_bits(saved):
    config, params, folder = saved
    loaded_config, loaded = load_checkpoint(folder)
    assert loaded_config == config
    assert same(loaded, params)


def test_bfloat16_is_kept(saved):
    config, params, folder = saved
    half = jax.tree.map(lambda leaf: leaf.astype(jnp.bfloat16), params)
    save_checkpoint(folder / "half", config, half)
    assert same(load_checkpoint(folder / "half", dtype=jnp.bfloat16)[1], half)
    assert same(load_checkpoint(folder, dtype=jnp.bfloat16)[1], half)


def test_transformers_reads_what_is_saved(saved):
    config, params, folder = saved
    model = transformers.AutoModelForCausalLM.from_pretrained(folder, attn_implementation="eager")
    ours = np.asarray(forward(config, params, jnp.asarray(TOKENS, jnp.int32)))
    options = {"softcap": config.attn_softcap} if config.attn_softcap else {}
    assert model.dtype == torch.float32
    assert np.abs(ours - models.logits_of(model, TOKENS, **options)).max() < 1e-4


def test_shards_are_one_checkpoint(tmp_path):
    model = models.gpt_oss()
    model.save_pretrained(tmp_path / "one")
    model.save_pretrained(tmp_path / "many", max_shard_size="30KB")
    shards = sorted((tmp_path / "many").glob("*.safetensors"))
    assert len(shards) > 3
    assert not (tmp_path / "many" / "model.safetensors").exists()
    assert same(load_checkpoint(tmp_path / "many")[1], load_checkpoint(tmp_path / "one")[1])
    shards[2].unlink()
    with pytest.raises(FileNotFoundError, match=shards[2].name):
        load_checkpoint(tmp_path / "many")


def test_missing_surplus_and_wrong_tensors_are_named(saved):
    _, _, folder = saved

    def change(tensors):
        del tensors["model.layers.1.self_attn.q_proj.weight"]
        tensors["model.layers.9.mlp.weight"] = np.zeros((2, 3), np.float32)
        tensors["model.norm.weight"] = np.zeros(31, np.float32)

    change_tensors(folder, change)
    with pytest.raises(ValueError, match="do not fit") as error:
        load_checkpoint(folder)
    for part in (
        "missing model.layers.1.self_attn.q_proj.weight (64, 32)",
        "surplus model.layers.9.mlp.weight (2, 3)",
        "model.norm.weight expected (32,), found (31,)",
    ):
        assert part in str(error.value)


def test_a_long_list_of_tensors_is_cut(saved):
    _, _, folder = saved
    change_tensors(folder, dict.clear)
    with pytest.raises(ValueError, match=r"missing .*; and \d+ more of these$"):
        load_checkpoint(folder)


def test_a_copy_of_a_tied_embedding_must_be_one(tmp_path):
    params = random_params(server.GEMMA, jax.random.key(0))
    save_checkpoint(tmp_path, server.GEMMA, params)
    name, embedding = "lm_head.weight", "model.embed_tokens.weight"
    change_tensors(tmp_path, lambda tensors: tensors.update({name: tensors[embedding]}))
    assert same(load_checkpoint(tmp_path)[1], params)
    change_tensors(tmp_path, lambda tensors: tensors.update({name: -tensors[embedding]}))
    with pytest.raises(ValueError, match=r"lm_head.weight is not the same as model.embed_tokens"):
        load_checkpoint(tmp_path)


def packed(rng, experts, rows, columns):
    """Random MXFP4 blocks and scales of a matrix that is published [experts, rows, columns]."""
    shape = (experts, columns, rows // 32)
    blocks = rng.integers(0, 256, (*shape, 16), np.uint8)
    return blocks, rng.integers(120, 130, shape, np.uint8)


def test_mxfp4_is_expanded_as_transformers_does():
    blocks, scales = packed(np.random.default_rng(0), 2, 96, 7)
    blocks[0, 0, 0] = np.arange(16) * 17  # every number in both halves
    scales[0, :2, 0] = [1, 250]
    theirs = convert_moe_packed_tensors(
        torch.tensor(blocks), torch.tensor(scales), dtype=torch.float32
    )
    assert theirs.shape == (2, 96, 7)
    assert np.array_equal(dequantise(blocks, scales), theirs.numpy())


def test_a_checkpoint_with_quantised_experts(tmp_path):
    config = models.gpt_oss(intermediate_size=32)
    config.save_pretrained(tmp_path)
    rng, expected = np.random.default_rng(0), {}

    def quantise(tensors):
        for name in [name for name in tensors if name.endswith(("gate_up_proj", "down_proj"))]:
            blocks, scales = packed(rng, *tensors.pop(name).shape)
            tensors |= {f"{name}_blocks": blocks, f"{name}_scales": scales}
            expected[name] = dequantise(blocks, scales)

    change_tensors(tmp_path, quantise)
    change_config(tmp_path, quantization_config={"quant_method": "mxfp4"})
    _, params = load_checkpoint(tmp_path)
    for place, layer in enumerate(params["layers"]):
        for key in ("gate_up", "down"):
            name = f"model.layers.{place}.mlp.experts.{key}_proj"
            assert np.array_equal(layer[key], expected[name])

    change_tensors(tmp_path, lambda t: t.pop("model.layers.0.mlp.experts.down_proj_scales"))
    with pytest.raises(ValueError, match=r"missing .*layers.0.mlp.experts.down_proj_scales \(5, "):
        load_checkpoint(tmp_path)


def test_generation_config_names_the_tokens_that_end_a_text(saved):
    _, _, folder = saved
    (folder / "generation_config.json").write_text('{"eos_token_id": [7, 9]}')
    assert load_checkpoint(folder)[0].eos_token_ids == (7, 9)
    (folder / "generation_config.json").write_text('{"temperature": 1.0}')
    assert load_checkpoint(folder)[0].eos_token_ids == ()


def test_what_is_not_a_checkpoint_is_refused(saved, monkeypatch):
    _, _, folder = saved
    with pytest.raises(FileNotFoundError, match=r"needs config\.json"):
        load_checkpoint(folder / "nowhere")
    with monkeypatch.context() as patch:
        patch.setitem(sys.modules, "safetensors", None)
        with pytest.raises(ImportError, match=r"pip install 'swa-jax\[models\]'"):
            load_checkpoint(folder)
    (folder / "model.safetensors").unlink()
    with pytest.raises(FileNotFoundError, match=r"model\.safetensors or model.*has neither"):
        load_checkpoint(folder)
    (folder / "config.json").write_text("{")
    with pytest.raises(ValueError, match="is not JSON"):
        load_checkpoint(folder)


def test_parameters_of_another_model_are_not_saved(saved):
    config, params, folder = saved
    layers = params["layers"]
    broken = params | {
        "layers": ({**layers[0], "q": layers[0]["q"].T}, *layers[1:-1]),
        "extra": jnp.zeros(3),
    }
    with pytest.raises(ValueError, match="parameters do not fit") as error:
        save_checkpoint(folder / "broken", config, broken)
    for part in (
        f"missing layers.{config.num_layers - 1}.down ",
        "surplus extra (3,)",
        "layers.0.q expected (32, 64), found (64, 32)",
    ):
        assert part in str(error.value)
    assert not (folder / "broken").exists()
