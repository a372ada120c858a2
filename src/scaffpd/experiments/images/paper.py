"""What the paper reports on images: average and worst-20 % accuracy in per cent (its tables 1, 2, 3 and 4).

A single number each; the paper says nothing of seeds or deviations. Its features are those of a ResNet-18. That DRFA
has the same numbers on Tiny-ImageNet for α = 0.05 and 0.1 is in the paper.
"""

from __future__ import annotations

Reported = dict[str, tuple[float, float]]

NUMBERS: dict[tuple[str, float], Reported] = {
    ("cifar100", 0.01): {
        "FedAvg": (38.77, 15.93), "SCAFFOLD": (37.38, 14.65), "q-FFL": (26.39, 5.43), "AFL": (47.38, 18.04),
        "DRFA": (46.47, 26.77), "FedProx": (38.76, 15.58), "Δ-FL": (30.09, 7.26), "Scaff-PD": (49.03, 29.30),
    },
    ("cifar100", 0.05): {
        "FedAvg": (35.96, 24.43), "SCAFFOLD": (35.28, 24.77), "q-FFL": (29.60, 18.62), "AFL": (44.73, 22.06),
        "DRFA": (41.61, 27.66), "FedProx": (35.91, 24.57), "Δ-FL": (33.18, 15.82), "Scaff-PD": (42.06, 28.37),
    },
    ("cifar100", 0.1): {
        "FedAvg": (36.57, 26.50), "SCAFFOLD": (35.63, 25.61), "q-FFL": (30.38, 21.98), "AFL": (44.89, 27.27),
        "DRFA": (43.20, 32.04), "FedProx": (36.49, 26.45), "Δ-FL": (31.69, 16.63), "Scaff-PD": (43.69, 32.77),
    },
    ("tinyimagenet", 0.01): {
        "FedAvg": (33.66, 18.18), "SCAFFOLD": (31.79, 15.85), "q-FFL": (25.50, 9.70), "AFL": (45.32, 18.65),
        "DRFA": (36.80, 22.32), "FedProx": (33.65, 18.09), "Δ-FL": (29.06, 11.94), "Scaff-PD": (41.26, 25.32),
    },
    ("tinyimagenet", 0.05): {
        "FedAvg": (31.53, 23.46), "SCAFFOLD": (30.43, 22.57), "q-FFL": (27.45, 19.38), "AFL": (45.54, 28.02),
        "DRFA": (37.39, 28.38), "FedProx": (31.52, 23.62), "Δ-FL": (36.77, 22.24), "Scaff-PD": (39.32, 30.27),
    },
    ("tinyimagenet", 0.1): {
        "FedAvg": (35.08, 27.61), "SCAFFOLD": (34.58, 27.33), "q-FFL": (32.90, 26.24), "AFL": (46.11, 29.50),
        "DRFA": (37.39, 28.38), "FedProx": (34.98, 27.59), "Δ-FL": (36.47, 20.13), "Scaff-PD": (41.23, 29.78),
    },
    ("cifar10", 0.05): {
        "FedAvg": (77.42, 60.63), "SCAFFOLD": (77.75, 62.89), "q-FFL": (68.52, 41.26), "AFL": (78.89, 65.07),
        "DRFA": (79.04, 65.02), "Scaff-PD": (79.71, 69.59),
    },
    ("cifar100-50clients", 0.01): {
        "FedAvg": (45.45, 20.64), "SCAFFOLD": (43.73, 18.33), "q-FFL": (33.42, 8.13), "AFL": (49.93, 31.87),
        "DRFA": (51.07, 31.23), "Scaff-PD": (50.43, 33.03),
    },
}  # fmt: skip
