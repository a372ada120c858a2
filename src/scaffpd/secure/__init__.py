"""Any federation with secure sums: the waist's questions, with every vector left at its client.

aggregation  `SecureAggregation`, a `Federation`
answers      what algorithms see: sums and scalars
sums         one secure sum: exchanges, number formats, what they cost
reach        how clients are reached, and what each of them does
cohort_reach the clients of a cohort
"""

from scaffpd.secure.aggregation import SecureAggregation

__all__ = ["SecureAggregation"]
