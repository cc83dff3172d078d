"""The paper's tables and figures: published numbers, the runs behind each table, and verdicts on its claims.

| in the paper | module |
| --- | --- |
| Tables 1, 2, 4; Appendix C.1, C.2, C.3, C.6 | `method_tables` |
| Table 3 | `table3_glue` |
| Table 5 | `table5_judgements` |
| Figure 1; Appendix C.4, C.5, D | `classifier_figures` |
| Figure 2 | `figure2_redundancy` |
| Figure 3 | `figure3_head_counts` |
| Appendix E | `graph_texts` |

`catalogue` lists them all, `reproduce` runs them, `published` has the paper's numbers and claims, `verdicts` judges.
`all_claims` judges the rows of `classifier_claims` and `system_claims` by the committed results of a checkout;
`claims_report` writes them.
"""
