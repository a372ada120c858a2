"""Any federation with secure sums: every vector stays with its client, and the server learns weighted sums.

aggregation  `SecureAggregation`, a `Federation` whose sums are masked
sums         one secure sum: exchanges, number formats, and their cost
parties      clients with keys of their own, and what each of them checks before it answers
"""

from scaffpd.secure.aggregation import SecureAggregation

__all__ = ["SecureAggregation"]
