"""LAP-SGD and LPP-SGD: several updaters of each rank share one model without locks; ranks average without waiting.

`run_local_async` trains a job so; docs/local-async.md tells how. Source: Algorithm 1 of "Federated SGD with Local
Asynchrony" (Chatterjee, Kungurtsev, Alistarh).
"""
