"""Visits to twenty clinics, per year at risk: rate ratios, and a model that serves every clinic.

Run it whole (`python examples/counts.py`, seconds), or cell by cell in an editor that knows `# %%`.
"""

# %%
# Patients were followed for half a year to five years, and visits vary more than Poisson's law
# allows. In one clinic of four the young come
# most, in the others the old.

import numpy as np

import scaffpd as sp

random = np.random.default_rng(0)
AGE, SMOKER = 0.6, 0.5  # the truth: logarithms of rate ratios
train, test = [], []
for clinic in range(20):
    age, smoker = random.normal(size=160), random.integers(0, 2, 160)
    years = random.uniform(0.5, 5, 160)
    rate = np.exp((-AGE if clinic % 4 == 0 else AGE) * age + SMOKER * smoker - 1)
    visits = random.poisson(years * rate * random.gamma(4, 1 / 4, 160))
    X, y = np.column_stack([age, smoker]), np.column_stack([visits, years])
    train.append((X[:120], y[:120]))
    test.append((X[120:], y[120:]))

# %%
# The exposure is the last column of y. The dispersion is found by likelihood: 1/4 is true.

model = sp.Linear("poisson", l2=0.01, intercept=True, exposed=True, dispersion="auto")
cohort = sp.Cohort(train, model, test=test)
print(f"variance μ + {cohort.model.dispersion:.2f} μ²")
for objective in (sp.Average(), sp.CVaR(alpha=0.25)):
    result = sp.train(sp.fair(objective), cohort, tol=1e-8, progress=False)
    losses = cohort.evaluate(result.x, "test").loss
    print(f"{objective}: loss {losses.mean():.3f}, where the young come {losses[::4].mean():.3f}")

# %%
# Rate ratios to report, with clinics that may differ in both columns.

found = sp.coefficients(sp.Cohort(train, sp.Linear("poisson", intercept=True, exposed=True)))
print(found)
print(
    "rate ratio of a smoker:", np.exp(found.estimate[1]).round(2), "true:", np.exp(SMOKER).round(2)
)
