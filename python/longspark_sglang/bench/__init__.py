"""`longspark bench`: measurements that anybody can repeat, and a gate that CI can run.

Every measurement writes JSON lines. The first says on what and with what it was made (`record`);
plots, the HTML report and the regression gate read nothing but those lines.
"""
