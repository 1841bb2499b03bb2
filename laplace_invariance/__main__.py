from laplace_invariance.cli import main

main()
