"""Breast-cancer patients of six regions: Cox's model for all, and what every region gains from it.

Run it whole (`python examples/survival.py`, seconds), or cell by cell in an editor that knows
`# %%`. The table ships with scaffpd (TCGA-BRCA as FLamby has it).
"""

# %%
import numpy as np

import scaffpd as sp

silos = sp.data.tcga_brca()
for name, (X, y) in zip(silos.names, silos.train, strict=True):
    print(f"{name:24} {len(X):4} patients, {int(y[:, 1].sum()):3} deaths")

# %%
# Risk sets are each region's own. Strengths come from the evidence of all rows, and the optimum is
# proven, as for any other loss.

model = sp.Linear("cox", l2="auto")
cohort = sp.Cohort(silos.train, model, names=silos.names, test=silos.test)
for objective in (sp.Average(), sp.ChiSquare(rho=0.1)):
    result = sp.train(sp.fair(objective), cohort, tol=1e-6, progress=False)
    concordance = cohort.evaluate(result.x, "test").score
    print(f"{objective}: concordance {np.nanmean(concordance):.2f}, gap {result.certificate:.0e}")

# %%
# Does joining pay? Alone, one model for all and personal models, on held-out patients.

found = sp.joining(silos.train, silos.test, model, sp.ChiSquare(0.1), names=silos.names)
print(*found.verdict.sentences(found.task, "region"), sep="\n")
