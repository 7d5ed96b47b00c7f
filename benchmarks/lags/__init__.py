"""LAGS-SGD: what sending selected elements costs in accuracy, and its Eq. 20 and Eq. 21 held against what happens."""
