"""Any federation with secure sums: every vector stays with its client, and the server learns weighted sums.

aggregation  `SecureAggregation`, a `Federation`, and the sums and scalars that algorithms see of it
sums         one secure sum: exchanges, number formats, and their cost
channel      how clients are reached, and what each of them checks before it answers
"""

from scaffpd.secure.aggregation import SecureAggregation

__all__ = ["SecureAggregation"]
