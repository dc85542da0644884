from experiments.nano.report.card import main

raise SystemExit(main())
