"""Block drafts of targets' makers, from their own files: Muse-Glimmer's by transformers, Laguna's written out. In fp64,
with nothing kept between blocks: the tests' oracles."""

import json
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import rms_norm, silu, softplus

from slipstream.tests.naive_dflash import Block, NaiveDFlash
from slipstream.tests.naive_eagle3 import attended, turned


class MuseGlimmerDraft(NaiveDFlash):
    """transformers' MuseGlimmerAssistantModel. `target` is the folder of the model whose logits the head gives."""

    def __init__(self, draft: Path, target: Path, embeddings: Tensor, head: Tensor):
        from transformers import MuseGlimmerAssistantModel  # later than the oldest release that the package allows

        text = json.loads((target / "config.json").read_text())["text_config"]
        self.target_fields = {name: text[name] for name in ("output_multiplier", "final_logit_softcapping")}
        super().__init__(draft, embeddings, head)
        options = {"dtype": torch.float64, "attn_implementation": "eager", "output_loading_info": True}
        self.model, loading = MuseGlimmerAssistantModel.from_pretrained(draft, **options)
        assert not any(loading.values()), "all of the file is understood"
        # Its eager mask counts positions before a query, its flash attention and other servers the query's own, too.
        self.model.config.sliding_window -= 1

    @property
    def heads(self) -> dict[str, Any]:
        return self.config | self.target_fields

    @torch.no_grad()
    def block(self, aux_states: Tensor, anchor: int, slots: int) -> Block:
        from transformers.cache_utils import DFlashCache

        tokens = [anchor] + [self.heads["mask_token_id"]] * (slots - 1)
        embeds = self.embeddings[tokens][None]
        cache = DFlashCache(config=self.model.config)
        cache.set_previous_accepted_tokens(len(aux_states))  # from which its masks have their sizes
        context = aux_states.double()[None]
        states = self.model(noise_embeds=embeds, context_hidden_states=context, cache=cache).last_hidden_state[0]
        return Block(states, states, states)


class LagunaDraft(NaiveDFlash):
    """DFlashLagunaForCausalLM: with taps t_i and letters of the engine's,

        context = norm(fc([norm_i(t_i)])),
        k, v of layer l = W_l norm_l(context), W_l norm_l(x),
        x <- x + W_o (softplus(G_l norm_l(x)) * attention(q, k, v)),  x <- x + MLP(norm(x)),

    each query causally over a window of context and block.
    """

    def fuse(self, aux_states: Tensor) -> Tensor:
        layers = self.heads["target_layer_ids"]
        taps = aux_states.double().chunk(len(layers), dim=-1)
        normed = [self._normed(tap, f"aux_hidden_norms.{place}") for place, tap in enumerate(taps)]
        return self._normed(torch.cat(normed, dim=-1) @ self.weights["fc.weight"].T, "hidden_norm")

    def block(self, aux_states: Tensor, anchor: int, slots: int) -> Block:
        context = self.fuse(aux_states)
        x = self.embeddings[[anchor] + [self.heads["mask_token_id"]] * (slots - 1)]
        for layer in range(self.config["num_hidden_layers"]):
            name = f"layers.{layer}"
            rows = self._normed(torch.cat((context, x)), f"{name}.input_layernorm")
            x = x + self._attended(rows, slots, f"{name}.self_attn")
            normed = self._normed(x, f"{name}.post_attention_layernorm")
            gate, up, down = (self.weights[f"{name}.mlp.{part}_proj.weight"] for part in ("gate", "up", "down"))
            x = x + (silu(normed @ gate.T) * (normed @ up.T)) @ down.T
        return Block(x, x, self._normed(x, "norm"))

    def _attended(self, rows: Tensor, slots: int, name: str) -> Tensor:
        size = self.config["head_dim"]
        sizes = [self.config["num_attention_heads"], *[self.config["num_key_value_heads"]] * 2]
        projected = (rows @ self.weights[f"{name}.qkv_proj.weight"].T).unflatten(-1, (-1, size))
        q, k, v = projected.split(sizes, dim=1)
        theta = self.config["rope_theta"]
        q, k = (turned(self._normed(x, f"{name}.{part}_norm"), theta) for part, x in (("q", q), ("k", k)))
        pairs = torch.ones(len(rows), len(rows), dtype=torch.bool)
        hidden = pairs.triu(1) | pairs.tril(-self.config["sliding_window"])
        outputs = attended(q[-slots:], k, v, hidden[-slots:])
        factors = softplus(rows[-slots:] @ self.weights[f"{name}.g_proj.weight"].T)
        outputs = outputs * factors.view(slots, len(outputs[0]), -1)
        return outputs.flatten(1) @ self.weights[f"{name}.o_proj.weight"].T

    def _normed(self, x: Tensor, name: str) -> Tensor:
        return rms_norm(x, x.shape[-1:], self.weights[f"{name}.weight"], self.config["rms_norm_eps"])
