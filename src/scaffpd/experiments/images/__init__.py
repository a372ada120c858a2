"""The paper's tables and figures on images (its section 5.2 and appendix C), recomputed."""
