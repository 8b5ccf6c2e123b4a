"""Known architectures that are not served, which no field of their configs tells apart -> what serving them needs.

docs/families.md has the same table. A family that is served leaves it.
"""

LAYER_NORM = "LayerNorm"
NO_GATE = "MLPs without a gate"
PARALLEL = "attention and MLP in parallel"
MAKERS_CODE = "its makers' code, which transformers lacks"

NEEDS: dict[str, str] = {
    "AfmoeForCausalLM": "gates of attention's output by layer, norms of inputs and outputs",
    "ApertusForCausalLM": f"{NO_GATE} (xIELU)",
    "BailingMoeForCausalLM": MAKERS_CODE,  # Ling and Ring
    "BailingMoeV2ForCausalLM": MAKERS_CODE,
    "BeamForCausalLM": "biases of attention's output gates, queries that grow in full layers alone",
    "BitNetForCausalLM": "norms inside attention and MLP, ternary weights",
    "BloomForCausalLM": f"{LAYER_NORM}, {NO_GATE}",
    "Cohere2ForCausalLM": f"{LAYER_NORM}, {PARALLEL}",
    "CohereForCausalLM": f"{LAYER_NORM}, {PARALLEL}",
    "DbrxForCausalLM": f"{LAYER_NORM}, clipped projections",
    "DeepseekV4ForCausalLM": "compressed attention, hyper-connections",
    "DiffLlamaForCausalLM": "differential attention",
    "FalconForCausalLM": f"{LAYER_NORM}, {NO_GATE}",
    "GPTBigCodeForCausalLM": f"{LAYER_NORM}, {NO_GATE}",
    "GPTJForCausalLM": f"{LAYER_NORM}, {NO_GATE}",
    "GPTNeoXForCausalLM": f"{LAYER_NORM}, {NO_GATE}",
    "Gemma3nForCausalLM": "embeddings by layer, KV that layers share, AltUp",
    "Jais2ForCausalLM": f"{LAYER_NORM}, {NO_GATE}",
    "JetMoeForCausalLM": "attention with experts",
    "Kolibri1ForCausalLM": "a router whose choice adds a bias to logits",
    "Llama4ForCausalLM": "attention in chunks, a router that scales inputs",
    "MiMoV2FlashForCausalLM": "values of another size than keys",
    "MptForCausalLM": f"{LAYER_NORM}, {NO_GATE}",
    "NanoChatForCausalLM": "norms without weights, a rotation the other way",
    "NemotronForCausalLM": f"{LAYER_NORM}, {NO_GATE}",
    "OPTForCausalLM": f"{LAYER_NORM}, {NO_GATE}",
    "OlmoForCausalLM": f"{LAYER_NORM} without weights",
    "PhiForCausalLM": f"{LAYER_NORM}, {PARALLEL}",
    "PhimoeForCausalLM": f"{LAYER_NORM}, a sparsemixer router",
    "StableLmForCausalLM": LAYER_NORM,
    "Starcoder2ForCausalLM": f"{LAYER_NORM}, {NO_GATE}",
    "xLSTMForCausalLM": "recurrent layers",
}
