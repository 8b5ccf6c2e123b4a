"""Known architectures that are not served, which no field of their configs tells apart -> what serving them needs.

docs/families.md has the same table. A family that is served leaves it.
"""

LAYER_NORM = "LayerNorm"
NO_GATE = "MLPs without a gate"
PARALLEL = "attention and MLP in parallel"
SIGMOID = "a sigmoid router"

NEEDS: dict[str, str] = {
    "AfmoeForCausalLM": f"{SIGMOID}, gates of attention's output by layer",
    "ApertusForCausalLM": f"{NO_GATE} (xIELU)",
    "BeamForCausalLM": SIGMOID,
    "BitNetForCausalLM": "norms inside attention and MLP, ternary weights",
    "BloomForCausalLM": f"{LAYER_NORM}, {NO_GATE}",
    "Cohere2ForCausalLM": f"{LAYER_NORM}, {PARALLEL}",
    "CohereForCausalLM": f"{LAYER_NORM}, {PARALLEL}",
    "DbrxForCausalLM": f"{LAYER_NORM}, clipped projections",
    "DeepseekV4ForCausalLM": "compressed attention, hyper-connections",
    "DiffLlamaForCausalLM": "differential attention",
    "Dots1ForCausalLM": SIGMOID,
    "Ernie4_5_MoeForCausalLM": "a router whose choice adds a bias",
    "ExaoneMoeForCausalLM": SIGMOID,
    "FalconForCausalLM": f"{LAYER_NORM}, {NO_GATE}",
    "FlintForCausalLM": SIGMOID,
    "GPTBigCodeForCausalLM": f"{LAYER_NORM}, {NO_GATE}",
    "GPTJForCausalLM": f"{LAYER_NORM}, {NO_GATE}",
    "GPTNeoXForCausalLM": f"{LAYER_NORM}, {NO_GATE}",
    "Gemma3nForCausalLM": "embeddings by layer, KV that layers share, AltUp",
    "Glm4MoeForCausalLM": SIGMOID,
    "HYV3ForCausalLM": SIGMOID,
    "Jais2ForCausalLM": f"{LAYER_NORM}, {NO_GATE}",
    "JetMoeForCausalLM": "attention with experts",
    "Kolibri1ForCausalLM": SIGMOID,
    "Llama4ForCausalLM": "attention in chunks, a router that scales inputs",
    "MiMoV2FlashForCausalLM": f"{SIGMOID}, values of another size than keys",
    "MiniMaxM2ForCausalLM": SIGMOID,
    "MptForCausalLM": f"{LAYER_NORM}, {NO_GATE}",
    "NanoChatForCausalLM": "norms without weights, a rotation the other way",
    "NemotronForCausalLM": f"{LAYER_NORM}, {NO_GATE}",
    "OPTForCausalLM": f"{LAYER_NORM}, {NO_GATE}",
    "OlmoForCausalLM": f"{LAYER_NORM} without weights",
    "PhiForCausalLM": f"{LAYER_NORM}, {PARALLEL}",
    "PhimoeForCausalLM": f"{LAYER_NORM}, a sparsemixer router",
    "SolarOpenForCausalLM": SIGMOID,
    "StableLmForCausalLM": LAYER_NORM,
    "Starcoder2ForCausalLM": f"{LAYER_NORM}, {NO_GATE}",
    "xLSTMForCausalLM": "recurrent layers",
}
