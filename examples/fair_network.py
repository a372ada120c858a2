"""One small network for ten clients with different digits: for the average client, or for all?

Run it whole (`python examples/fair_network.py`, seconds), or cell by cell in an editor that knows
`# %%`. The digits ship with scikit-learn (`pip install ".[sklearn]"`).
"""

# %%
# Dirichlet(0.05): most clients have seen only a few of the ten digits.

import numpy as np
import torch

import scaffpd as sp

silos = sp.data.digits(clients=10, alpha=0.05, test_fraction=0.3)
print("digits per client:", [len(np.unique(y)) for _, y in silos.train])

# %%
# Any torch.nn.Module is a model. It is not convex, so nothing is proven; all else is the same. The
# three methods make ten local steps in each of twenty rounds.

methods = (
    sp.FedAvg(local_steps=10),
    sp.DRFA(local_steps=10),
    sp.fair(sp.ChiSquare(rho=0.1), local_steps=10),
)
for method in methods:
    torch.manual_seed(0)  # the same start for all
    network = torch.nn.Sequential(torch.nn.Linear(64, 16), torch.nn.ReLU(), torch.nn.Linear(16, 10))
    model = sp.Module(network)
    cohort = sp.Cohort(silos.train, model, names=silos.names, test=silos.test)
    result = sp.train(method, cohort, rounds=20, progress=False)
    right = cohort.evaluate(result.x, "test").score
    name = type(method).__name__
    print(f"{name:7} right in the mean {right.mean():.0%}, at the worst client {right.min():.0%}")

# %%
# The trained network is a module again.

print(model.network(result.x)(torch.zeros(1, 64)).argmax())
