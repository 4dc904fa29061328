"""The workloads, by numbers: every framework builds the same nets from them."""

# name: (batch, width, layers) of Dense + ReLU
MLP = {
    "mlp_b16_h2048_l6": (16, 2048, 6),
    "mlp_b64_h512_l4": (64, 512, 4),
    "mlp_b16_h128_l60": (16, 128, 60),
}
LENET_BATCH = 32
# batch, sequence, width, heads, layers, feed-forward width
TRANSFORMER = (8, 32, 128, 4, 2, 512)
# name: layers of Dense, each of width 64, for the first call
FIRST_CALL = {"20 parameters": 10, "200 parameters": 100, "1,000 parameters": 500}
MLP |= {name: (16, 64, layers) for name, layers in FIRST_CALL.items()}
WORKLOADS = [*list(MLP)[:3], "lenet5_b32", "transformer"]
QUICK = ["mlp_b64_h512_l4", "lenet5_b32"]
LEARNING_RATE, MOMENTUM = 1e-3, 0.9
LOSS_SCALE = 2.0**10
# The full step: micro-steps that make one update, the limit of the global norm (it clips), the decay of the averages.
FULL = ["mlp_b64_h512_l4", "lenet5_b32"]
FULL_OPTIMIZERS = ["Momentum", "AdamW"]
# Each optimizer beside its fused twin, on the two nets whose cost is the optimizer's.
OPTIMIZERS = ["SGD", "Momentum", "Adam", "AdamWeightDecay", "AdamW"]
FAMILY = ["mlp_b16_h2048_l6", "mlp_b64_h512_l4"]
ACCUMULATE_STEPS, CLIP_NORM, EMA_DECAY = 4, 1e-3, 0.999
ROUNDS, QUICK_ROUNDS = 40, 15
# In PYNATIVE_MODE a loss is there before its backward pass has run, so a round is several steps in a row.
PYNATIVE_STEPS = 3
