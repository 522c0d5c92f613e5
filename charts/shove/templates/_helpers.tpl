{{/* The name of everything the chart makes: "{release}-operator". */}}
{{- define "shove.name" -}}
{{ printf "%s-operator" .Release.Name | trunc 50 | trimSuffix "-" }}
{{- end -}}

{{- define "shove.selector" -}}
app.kubernetes.io/name: shove-operator
app.kubernetes.io/instance: {{ .Release.Name }}
{{- end -}}

{{- define "shove.labels" -}}
{{ include "shove.selector" . }}
app.kubernetes.io/version: {{ .Chart.AppVersion | quote }}
app.kubernetes.io/managed-by: {{ .Release.Service }}
helm.sh/chart: {{ printf "%s-%s" .Chart.Name .Chart.Version | replace "+" "_" }}
{{- end -}}

{{- define "shove.serviceAccount" -}}
{{- if .Values.serviceAccount.create -}}
{{ .Values.serviceAccount.name | default (include "shove.name" .) }}
{{- else -}}
{{ required "serviceAccount.name: name the ServiceAccount that exists, or let the chart make one (serviceAccount.create: true)" .Values.serviceAccount.name }}
{{- end -}}
{{- end -}}

{{/* The operator's image, which also runs the servers of Brokers with spec.embedded. */}}
{{- define "shove.image" -}}
{{ printf "%s:%s" .Values.image.repository (.Values.image.tag | default .Chart.AppVersion) }}
{{- end -}}

{{/* The namespaces in which the operator works, as JSON; the release's own when none is listed. */}}
{{- define "shove.namespaces" -}}
{{ .Values.watchNamespaces | default (list .Release.Namespace) | toJson }}
{{- end -}}

{{/*
What the operator's code declares that it needs, see config/rbac/role.yaml: the ClusterRole there is what it may do in
a namespace in which it works, the Role what it needs in its own. Call it with a dict of kind and root.
*/}}
{{- define "shove.rules" -}}
{{- $kind := .kind -}}
{{- range splitList "---\n" (.root.Files.Get "files/role.yaml") }}
{{- $doc := . | fromYaml }}
{{- if eq ($doc.kind | default "") $kind }}
{{- toYaml $doc.rules }}
{{- end }}
{{- end }}
{{- end -}}

{{- define "shove.subject" -}}
- kind: ServiceAccount
  name: {{ include "shove.serviceAccount" . }}
  namespace: {{ .Release.Namespace }}
{{- end -}}
