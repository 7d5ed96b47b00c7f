"""The three example documents of the format description, character for character."""

PROFILE = """
{"schema": "planner.profile/1",
 "model": {"name": "resnet20", "fingerprint": "sha256:…"},
 "world": {"ranks": 4, "nodes": 4, "backend": "gloo", "device": "cpu", "torch": "2.13.0", "measured": "2026-11-21T04:00:00Z"},
 "compute": {"forward_us": 41000.0, "update_us": 900.0,
             "gradients": [{"name": "fc.bias", "layer": "fc", "numel": 10, "dtype": "float32", "backward_us": 120.0}]},
 "cluster": { }}
"""  # noqa: E501

CLUSTER = """
{"schema": "planner.cluster/1", "name": "k80-10gbe", "nodes": 8, "ranks_per_node": 1, "nics_per_node": 1,
 "intra": {"alpha_us": 5.0, "beta_us_per_byte": 1e-4, "gamma_us_per_byte": 0.0},
 "inter": {"alpha_us": 45.0, "beta_us_per_byte": 8e-4, "gamma_us_per_byte": 0.0},
 "collectives": {"all_reduce": {"alpha_us": 633.64, "beta_us_per_byte": 0.0016}},
 "sparsify": {"alpha_us": 20.0, "beta_us_per_byte": 1e-6},
 "samples": {"all_reduce": [[1024, 700.1], [1048576, 2300.0]]}}
"""

PLAN = """
{"schema": "planner.plan/1",
 "model": {"name": "resnet20", "fingerprint": "sha256:…"}, "world": {"ranks": 4, "nodes": 4},
 "accuracy": "exact",
 "buckets": [{"gradients": ["fc.bias", "fc.weight"], "collective": "all_reduce", "algorithm": "library",
              "compressor": {"name": "none"}}],
 "delay": null, "local_async": null,
 "predicted": {"iteration_us": 61000.0, "forward_us": 41000.0, "backward_us": 19000.0, "exposed_us": 100.0,
               "timeline": [{"task": "bucket 0 all_reduce", "resource": "network", "start_us": 41200.0, "end_us": 43000.0}]},
 "baselines": {"wfbp": {"iteration_us": 0.0}, "single": {"iteration_us": 0.0}, "mg_wfbp": {"iteration_us": 0.0}, "ddp": {"iteration_us": 0.0}},
 "certificate": {"method": "dynamic programming", "lower_bound_us": 61000.0, "gap": 0.0}}
"""  # noqa: E501

LAYERS = """
[{"name": "fc", "kind": "linear", "flops": 1280, "activation_bytes": 40, "forward_us": 10.0, "grad_input_us": 5.0,
  "grad_weight_us": 5.0}]
"""
"""The optional `layers` of a profile, with every field named there."""

COMPRESSORS = (
    '{"name": "wire", "dtype": "bfloat16"}',
    '{"name": "topk", "selector": "exact", "k": {"layer4.conv": 120, "fc": 51}}',
    '{"name": "topk", "selector": "mstopk", "density": 0.01}',
    '{"name": "topk", "selector": "sampled", "density": 0.01, "scope": "layer"}',
    '{"name": "randomk", "density": 0.5, "scope": "bucket"}',
    '{"name": "wire", "dtype": "int8", "block": 256, "error_feedback": true}',
    '{"name": "wire", "dtype": "float8_e4m3fn", "block": 256, "rounding": "stochastic", "links": "all"}',
    '{"name": "wire", "dtype": "float16", "error_feedback": false, "rounding": "nearest"}',
    '{"name": "wire", "dtype": "int8", "links": "inter"}',
    '{"name": "powersgd", "rank": 4}',
)

DELAY = """
{"steps": 4, "warmup_steps": 500, "local_update": "glu", "alpha": 2.0, "beta": 0.5, "local_lr_scale": 4.0}
"""

OUTER = """
{"every": 30, "fragments": [["fc.bias", "fc.weight"]], "delay_steps": 2, "mix": 0.5,
 "optimizer": {"name": "nesterov", "lr": 0.7, "momentum": 0.9}, "warmup_steps": 500}
"""

LOCAL_ASYNC = """
{"updaters": 4, "blocks": [["fc.weight", "fc.bias"]], "full_fraction": 0.1, "average_every": 1, "then_every": 16,
 "switch_fraction": 0.5}
"""
